// The search, and what is made of it: trees as lists.
#include <nanobind/stl/function.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "bindings.h"
#include "search.h"
#include "sizing.h"

namespace nb = nanobind;
using namespace nb::literals;
using leapahead::Search;

namespace {

// The elements of a list or a tuple of integers, from the element `first` on and before `end`.
std::vector<int32_t> integers(nb::handle list, size_t first = 0, size_t end = SIZE_MAX) {
    const nb::object items = nb::steal(PySequence_Fast(list.ptr(), "this is not a list of integers"));
    if (!items.is_valid()) throw nb::python_error();
    std::vector<int32_t> found;
    const auto size = std::min(static_cast<size_t>(PySequence_Fast_GET_SIZE(items.ptr())), end);
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

using Searches = std::vector<Search *>;

void require_each(const Searches &searches, size_t given) {
    if (searches.size() != given) throw nb::value_error("there must be one for each search");
}

// Begins the searches for the next trees of texts, whose sources read what is new in them. Limits: nodes, depth, leaves.
void begin(const Searches &searches, nb::list texts, nb::sequence limits) {
    require_each(searches, texts.size());
    require_each(searches, nb::len(limits));
    for (size_t i = 0; i < searches.size(); ++i) {
        const nb::object text = texts[i];
        const size_t length = nb::len(text);
        if (length == 0) throw nb::value_error("the text is empty");
        const auto [nodes, depth, leaves] = nb::cast<std::tuple<int64_t, int64_t, int64_t>>(limits[i]);
        searches[i]->begin({length, integers(text, length - searches[i]->unread(length))}, {nodes, depth, leaves});
    }
}

// The names of a search's sources as interned strings, and in front of them that of the root.
class Names {
  public:
    // Made anew where the last search had other sources.
    const std::vector<nb::object> &of(const Search &search) {
        bool same = objects_.size() == static_cast<size_t>(search.num_sources()) + 1;
        for (int i = 0; same && i < search.num_sources(); ++i) same = names_[i] == search.source(i).name();
        if (same) return objects_;
        names_.clear();
        objects_.assign(1, nb::steal(PyUnicode_InternFromString("")));
        for (int i = 0; i < search.num_sources(); ++i) {
            names_.push_back(search.source(i).name());
            objects_.push_back(nb::steal(PyUnicode_InternFromString(names_.back().c_str())));
        }
        return objects_;
    }

  private:
    std::vector<std::string> names_;
    std::vector<nb::object> objects_;
};

// Tokens, parents, depths and sources of the first `size` nodes, each as a list, and P of them as doubles in memory.
nb::tuple tree(const Search &search, int size, Names &named) {
    const auto &nodes = search.nodes();
    if (size < 1 || size > search.size()) throw nb::index_error("there are not so many nodes");
    const std::vector<nb::object> &names = named.of(search);
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

nb::list trees(const Searches &searches, const std::vector<int> &sizes) {
    require_each(searches, sizes.size());
    Names names;
    nb::list found;
    for (size_t i = 0; i < searches.size(); ++i) found.append(tree(*searches[i], sizes[i], names));
    return found;
}

// A numpy array's memory for reading, which is faster so than by way of nb::ndarray.
template <typename T>
class Table {
  public:
    Table() = default;
    Table(const Table &) = delete;
    Table &operator=(const Table &) = delete;
    ~Table() { PyBuffer_Release(&view_); }

    // Returns the columns that each row has in memory, of which k count; a row for each of the nodes is needed.
    size_t open(nb::handle array, int nodes, int k) {
        if (PyObject_GetBuffer(array.ptr(), &view_, PyBUF_STRIDES | PyBUF_FORMAT) != 0) throw nb::python_error();
        const char kind = view_.format != nullptr ? view_.format[0] : '?';
        const bool valid = view_.ndim == 2 && view_.itemsize == sizeof(T) && view_.shape[0] == nodes &&
                           view_.shape[1] >= k && view_.strides[1] == sizeof(T) &&
                           view_.strides[0] % static_cast<Py_ssize_t>(sizeof(T)) == 0 && view_.strides[0] >= 0 &&
                           (std::is_floating_point_v<T> ? kind == 'd' : kind == 'l' || kind == 'q');
        if (!valid) throw nb::value_error("tokens and logits must be int64 and float64 [nodes, k or more]");
        return static_cast<size_t>(view_.strides[0]) / sizeof(T);
    }
    const T *data() const { return static_cast<const T *>(view_.buf); }

  private:
    Py_buffer view_{};
};

// What the target chose after the nodes of a draft: the text, the position of the root, tokens and parents of the tree,
// the committed path and its tokens; and `best`, which gives the likeliest tokens after each node and their logits.
void learn(Search &search, nb::tuple step) {
    const nb::object text = step[0], best = step[6];
    const auto position = nb::cast<int64_t>(step[1]);
    const size_t length = nb::len(text), end = static_cast<size_t>(position) + 1;
    leapahead::Outcome outcome;
    outcome.length = length;
    outcome.position = position;
    outcome.tokens = integers(step[2]);
    outcome.parents = integers(step[3]);
    outcome.path = integers(step[4]);
    const int size = static_cast<int>(outcome.tokens.size());
    bool valid = position >= 0 && end <= length && size > 0 && outcome.parents.size() == outcome.tokens.size() &&
                 !outcome.path.empty();
    for (const int node : outcome.path) valid = valid && node >= 0 && node < size;
    outcome.depths.reserve(outcome.tokens.size());
    outcome.depths.push_back(0);
    for (int node = 1; valid && node < size; ++node) {
        const int parent = outcome.parents[node];
        valid = parent >= 0 && parent < node;
        if (valid) outcome.depths.push_back(outcome.depths[parent] + 1);
    }
    if (!valid) throw nb::value_error("these are not the nodes of a tree over this text");
    const size_t first = end - std::min<size_t>(end, leapahead::Outcome::kContext);
    outcome.last = integers(text, first, end);
    Table<int64_t> following;
    Table<double> logits;
    if (const int k = search.wanted(outcome)) {
        const nb::object arrays = best(k);
        outcome.width = following.open(arrays[0], size, k);
        if (logits.open(arrays[1], size, k) != outcome.width && size > 1)
            throw nb::value_error("tokens and logits must have one layout in memory");
        outcome.following = following.data();
        outcome.logits = logits.data();
    }
    search.observe(outcome);
    search.learn(outcome.path, integers(step[5]));
}

void learn_all(const Searches &searches, nb::list steps) {
    require_each(searches, steps.size());
    for (size_t i = 0; i < searches.size(); ++i) {
        const nb::tuple step = nb::cast<nb::tuple>(steps[i]);
        if (step.size() != 7) throw nb::value_error("a step has seven parts");
        learn(*searches[i], step);
    }
}

// State, P, and the sum of p over the candidates, of each node in which a source has a state.
std::vector<std::tuple<int, double, double>> states(Search &search, int source) {
    if (source < 0 || source >= search.num_sources()) throw nb::index_error("there are not so many sources");
    std::vector<std::tuple<int, double, double>> found;
    for (int node = 0; node < search.size(); ++node) {
        if (search.nodes()[node].depth >= search.limits().depth) continue;
        const int state = search.state(node, source);
        if (state == leapahead::Source::kNoState) continue;
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
        .def("__len__", &Search::size)
        .def_prop_ro("bound", &Search::bound)
        .def_prop_ro("next", &Search::next)
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
        .def("states", &states, "source"_a);
    m.def("begin", &begin, "searches"_a, "texts"_a, "limits"_a);
    m.def("trees", &trees, "searches"_a, "sizes"_a);
    m.def("learn", &learn_all, "searches"_a, "steps"_a);
    m.def(
        "best_sizes",
        [](const Searches &searches, const std::vector<double> &seconds, const std::vector<int> &sizes,
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
        [](const Searches &searches, int nodes) {
            std::vector<int> found;
            for (Search *search : searches) found.push_back(search->take_all(nodes));
            return found;
        },
        "searches"_a, "nodes"_a);
}
