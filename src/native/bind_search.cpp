// The search, and what is made of it: trees as lists.
#include <nanobind/stl/function.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "bindings.h"
#include "search.h"
#include "sizing.h"

namespace nb = nanobind;
using namespace nb::literals;
using leapahead::Search;

namespace {

// The elements of a list or a tuple of integers, from the element `first` on.
std::vector<int32_t> integers(nb::handle list, size_t first = 0) {
    const nb::object items = nb::steal(PySequence_Fast(list.ptr(), "this is not a list of integers"));
    if (!items.is_valid()) throw nb::python_error();
    std::vector<int32_t> found;
    const auto size = static_cast<size_t>(PySequence_Fast_GET_SIZE(items.ptr()));
    found.reserve(size - std::min(first, size));
    for (size_t i = first; i < size; ++i)
        found.push_back(static_cast<int32_t>(PyLong_AsLong(PySequence_Fast_GET_ITEM(items.ptr(), i))));
    if (PyErr_Occurred()) throw nb::python_error();
    return found;
}

// A list of `size` new objects.
template <typename New>
nb::object listed(int size, New make) {
    nb::object list = nb::steal(PyList_New(size));
    for (int i = 0; i < size; ++i) PyList_SET_ITEM(list.ptr(), i, make(i));
    return list;
}

void begin(Search &self, nb::list tokens, int64_t nodes, int64_t depth, int64_t leaves) {
    const size_t length = tokens.size();
    if (length == 0) throw nb::value_error("the text is empty");
    self.begin({length, integers(tokens, length - self.unread(length))}, {nodes, depth, leaves});
}

// Tokens, parents, depths and sources of the first `size` nodes, each as a list, and P of them as doubles in memory.
nb::tuple tree(const Search &search, int size) {
    const auto &nodes = search.nodes();
    if (size < 1 || size > search.size()) throw nb::index_error("there are not so many nodes");
    std::vector<nb::object> names{nb::steal(PyUnicode_InternFromString(""))};
    for (int i = 0; i < search.num_sources(); ++i)
        names.push_back(nb::steal(PyUnicode_InternFromString(search.source(i).name().c_str())));
    const nb::object sources = nb::steal(PyTuple_New(size)),
                     expected = nb::steal(PyBytes_FromStringAndSize(nullptr, size * static_cast<int>(sizeof(double))));
    char *values = PyBytes_AS_STRING(expected.ptr());
    for (int i = 0; i < size; ++i) {
        std::memcpy(values + i * sizeof(double), &nodes[i].expected, sizeof(double));
        PyTuple_SET_ITEM(sources.ptr(), i, nb::object(names[nodes[i].source + 1]).release().ptr());
    }
    return nb::make_tuple(listed(size, [&](int i) { return PyLong_FromLong(nodes[i].token); }),
                          listed(size, [&](int i) { return PyLong_FromLong(nodes[i].parent); }),
                          listed(size, [&](int i) { return PyLong_FromLong(nodes[i].depth); }), sources, expected);
}

// What the target chose after the nodes of a draft; `top_k` gives the likeliest tokens after each and their logits.
void observe(Search &self, nb::list text, int64_t position, nb::list tokens, nb::list parents, nb::tuple path,
             nb::tuple committed, nb::object top_k) {
    const size_t length = text.size(), end = static_cast<size_t>(position) + 1;
    leapahead::Outcome outcome;
    outcome.length = length;
    outcome.position = position;
    outcome.tokens = integers(tokens);
    outcome.parents = integers(parents);
    outcome.path = integers(path);
    const int size = static_cast<int>(outcome.tokens.size());
    bool valid = position >= 0 && end <= length && size > 0 && outcome.parents.size() == outcome.tokens.size() &&
                 !outcome.path.empty();
    for (const int node : outcome.path) valid = valid && node >= 0 && node < size;
    outcome.depths.assign(1, 0);
    for (int node = 1; valid && node < size; ++node) {
        const int parent = outcome.parents[node];
        valid = parent >= 0 && parent < node;
        if (valid) outcome.depths.push_back(outcome.depths[parent] + 1);
    }
    if (!valid) throw nb::value_error("these are not the nodes of a tree over this text");
    const size_t first = end - std::min<size_t>(end, leapahead::Outcome::kContext);
    outcome.last = integers(text, first);
    outcome.last.resize(end - first);
    std::optional<Matrix<int64_t>> following;
    std::optional<Matrix<double>> logits;
    if (const int k = self.wanted(outcome)) {
        const nb::object arrays = top_k(k);
        following = nb::cast<Matrix<int64_t>>(arrays[0]);
        logits = nb::cast<Matrix<double>>(arrays[1]);
        outcome.width = width(*following, *logits, outcome.tokens.size(), k);
        outcome.following = following->data();
        outcome.logits = logits->data();
    }
    self.observe(outcome);
    self.learn(outcome.path, integers(committed));
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
               std::shared_ptr<leapahead::AcceptanceTable> table, int mode, uint64_t seed, double temperature,
               double correction, leapahead::Filter filter) {
                new (self) Search(std::move(sources), std::move(table), static_cast<leapahead::Mode>(mode), seed,
                                  temperature, leapahead::Correction(correction), std::move(filter));
            },
            "sources"_a, "table"_a, "mode"_a, "seed"_a, "temperature"_a, "correction"_a, "filter"_a.none())
        .def("begin", &begin, "tokens"_a, "nodes"_a, "depth"_a, "leaves"_a)
        .def("__len__", &Search::size)
        .def_prop_ro("bound", &Search::bound)
        .def_prop_ro("next", &Search::next)
        .def_prop_ro("likeliest", &Search::likeliest)
        .def_prop_ro("expected",
                     [](const Search &self) {
                         std::vector<double> found;
                         for (const auto &node : self.nodes()) found.push_back(node.expected);
                         return found;
                     })
        .def_prop_ro("leaves", &Search::leaves)
        .def_prop_ro("deepest", &Search::deepest)
        .def("take", &Search::take)
        .def("take_all", &Search::take_all, "nodes"_a)
        .def("observe", &observe, "text"_a, "position"_a, "tokens"_a, "parents"_a, "path"_a, "committed"_a, "top_k"_a)
        .def("states", &states, "source"_a)
        .def("tree", &tree, "size"_a);
    m.def(
        "best_sizes",
        [](const std::vector<Search *> &searches, const std::vector<double> &seconds, const std::vector<int> &sizes,
           const std::vector<int> &replay, int sequences, int others, int longest, bool replays, bool branches,
           bool padded, double spent, double resizing, double base, double per_node) {
            if (searches.empty()) throw nb::value_error("there is no search");
            if (replay.size() != searches.size()) throw nb::value_error("there must be a number for each search");
            return leapahead::best_sizes(searches, {seconds, sizes, replay, sequences, others, longest, replays,
                                                    branches, padded, spent, resizing, base, per_node});
        },
        "searches"_a, "seconds"_a, "sizes"_a, "replay"_a, "sequences"_a, "others"_a, "longest"_a, "replays"_a,
        "branches"_a, "padded"_a, "spent"_a, "resizing"_a, "base"_a, "per_node"_a);
    m.def(
        "take_all",
        [](const std::vector<Search *> &searches, int nodes) {
            std::vector<int> found;
            for (Search *search : searches) found.push_back(search->take_all(nodes));
            return found;
        },
        "searches"_a, "nodes"_a);
}
