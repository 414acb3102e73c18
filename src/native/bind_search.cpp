// The search, and what is made of it: trees as lists.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "search.h"
#include "sizing.h"

namespace nb = nanobind;
using namespace nb::literals;
using leapahead::Search;

namespace {

nb::object interned(const std::string &name) { return nb::steal(PyUnicode_InternFromString(name.c_str())); }

// Tokens, parents, depths, sources and P of the first `size` nodes, each as a list.
nb::tuple tree(const Search &search, int size) {
    const auto &nodes = search.nodes();
    if (size < 1 || size > search.size()) throw nb::index_error("there are not so many nodes");
    nb::list tokens, parents, depths, sources, expected;
    std::vector<nb::object> names;
    for (int i = 0; i < search.num_sources(); ++i) names.push_back(interned(search.source(i).name()));
    const nb::object none = interned("");
    for (int i = 0; i < size; ++i) {
        tokens.append(nodes[i].token);
        parents.append(nodes[i].parent);
        depths.append(nodes[i].depth);
        sources.append(nodes[i].source < 0 ? none : names[nodes[i].source]);
        expected.append(nodes[i].expected);
    }
    return nb::make_tuple(tokens, parents, depths, nb::tuple(sources), expected);
}

// State, P, and the sum of p over the candidates, of each node in which a source has a state.
std::vector<std::tuple<int, double, double>> states(const Search &search, int source) {
    if (source < 0 || source >= search.num_sources()) throw nb::index_error("there are not so many sources");
    std::vector<std::tuple<int, double, double>> found;
    for (int node = 0; node < search.size(); ++node) {
        const int state = search.state(node, source);
        if (state == leapahead::Source::kNoState || search.nodes()[node].depth >= search.limits().depth) continue;
        found.emplace_back(state, search.nodes()[node].expected, search.total(node));
    }
    return found;
}

}  // namespace

void bind_search(nb::module_ &m) {
    nb::class_<Search>(m, "Search")
        .def(
            "__init__",
            [](Search *self, std::vector<std::shared_ptr<leapahead::Source>> sources,
               std::shared_ptr<leapahead::AcceptanceTable> table, double correction, int64_t nodes, int64_t depth,
               int64_t leaves, int mode, uint64_t seed, uint64_t position, double temperature, int32_t root) {
                new (self) Search(std::move(sources), std::move(table), std::move(correction), {nodes, depth, leaves},
                                  static_cast<leapahead::Mode>(mode), {seed, position, temperature}, root);
            },
            "sources"_a, "table"_a, "correction"_a, "nodes"_a, "depth"_a, "leaves"_a, "mode"_a, "seed"_a, "position"_a,
            "temperature"_a, "root"_a)
        .def("__len__", &Search::size)
        .def_prop_ro("bound", &Search::bound)
        .def_prop_ro("next", &Search::next)
        .def_prop_ro("expected",
                     [](const Search &self) {
                         std::vector<double> found;
                         for (const auto &node : self.nodes()) found.push_back(node.expected);
                         return found;
                     })
        .def("take", &Search::take)
        .def("take_all", &Search::take_all, "nodes"_a)
        .def("learn", nb::overload_cast<const std::vector<int> &, const std::vector<int32_t> &>(&Search::learn),
             "path"_a, "tokens"_a)
        .def("states", &states, "source"_a)
        .def("tree", &tree, "size"_a);
    m.def(
        "best_sizes",
        [](const std::vector<Search *> &searches, const std::vector<double> &seconds, const std::vector<int> &sizes,
           int sequences, bool padded, double spent, double resizing, double base, double per_node) {
            if (searches.empty()) throw nb::value_error("there is no search");
            return leapahead::best_sizes(searches,
                                         {seconds, sizes, sequences, padded, spent, resizing, base, per_node});
        },
        "searches"_a, "seconds"_a, "sizes"_a, "sequences"_a, "padded"_a, "spent"_a, "resizing"_a, "base"_a,
        "per_node"_a);
    m.def(
        "take_all",
        [](const std::vector<Search *> &searches, int nodes) {
            std::vector<int> found;
            for (Search *search : searches) found.push_back(search->take_all(nodes));
            return found;
        },
        "searches"_a, "nodes"_a);
}
