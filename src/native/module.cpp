// The module leapahead._native. Its classes are those of the same names in Python; _native.pyi has their types.
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "bindings.h"
#include "suffix_automaton.h"
#include "wide.h"

namespace nb = nanobind;
using namespace nb::literals;
using leapahead::SuffixAutomaton;

namespace {

// Raised whenever Python code and this module would not fit together; see leapahead/native.py.
constexpr int kInterface = 16;

int64_t checked(const SuffixAutomaton &automaton, int64_t state) {
    if (state < 0 || state >= automaton.size()) throw nb::index_error("there is no such state");
    return state;
}

using Tokens = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

nb::ndarray<nb::numpy, uint32_t, nb::ndim<1>> words(uint64_t seed, uint64_t position, Tokens tokens) {
    const size_t count = tokens.size();
    auto *found = new uint32_t[count];
    nb::capsule owner(found, [](void *data) noexcept { delete[] static_cast<uint32_t *>(data); });
    const std::vector<uint32_t> wanted(tokens.data(), tokens.data() + count);
    leapahead::noise_words(seed, position, wanted.data(), static_cast<int>(count), found);
    return {found, {count}, owner};
}

using Scores = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::vector<int64_t> leaders(Scores scores, uint64_t seed, uint64_t position, float unusual, uint32_t word) {
    std::vector<int64_t> found;
    leapahead::leaders(scores.data(), static_cast<int>(scores.size()), seed, position, unusual, word, found);
    return found;
}

// See leapahead::largest_at, of each row: indices and numbers, [rows, k].
template <typename T>
nb::tuple largest_at(nb::ndarray<const T, nb::ndim<2>, nb::device::cpu> rows, int k) {
    const size_t count = rows.shape(0), width = static_cast<size_t>(std::max(k, 0));
    if (rows.shape(1) < width || rows.shape(1) > INT32_MAX || (rows.shape(1) > 1 && rows.stride(1) != 1))
        throw nb::value_error("rows must be [rows, k or more], each contiguous");
    auto *indices = new int64_t[count * width];
    nb::capsule owner(indices, [](void *data) noexcept { delete[] static_cast<int64_t *>(data); });
    auto *values = new T[count * width];
    nb::capsule other(values, [](void *data) noexcept { delete[] static_cast<T *>(data); });
    for (size_t i = 0; i < count; ++i)
        leapahead::largest_at(rows.data() + static_cast<int64_t>(i) * rows.stride(0), static_cast<int>(rows.shape(1)),
                              static_cast<int>(width), indices + i * width, values + i * width);
    return nb::make_tuple(nb::ndarray<nb::numpy, int64_t, nb::ndim<2>>(indices, {count, width}, owner),
                          nb::ndarray<nb::numpy, T, nb::ndim<2>>(values, {count, width}, other));
}

}  // namespace

void bind_suffix_automaton(nb::module_ &m) {
    nb::class_<SuffixAutomaton>(m, "SuffixAutomaton")
        .def(nb::init<>())
        .def("__len__", &SuffixAutomaton::size)
        .def_prop_ro("tokens", &SuffixAutomaton::tokens)
        .def_prop_ro("end", &SuffixAutomaton::end)
        .def("add", &SuffixAutomaton::add, "token"_a)
        .def(
            "extend",
            [](SuffixAutomaton &self, const std::vector<int32_t> &tokens) {
                for (int32_t token : tokens) self.add(token);
            },
            "tokens"_a)
        .def("restart", &SuffixAutomaton::restart)
        .def(
            "step",
            [](const SuffixAutomaton &self, int64_t state, int32_t token) -> nb::object {
                const int32_t target = self.step(checked(self, state), token);
                return target < 0 ? nb::none() : nb::object(nb::int_(target));
            },
            "state"_a, "token"_a)
        .def(
            "followers",
            [](const SuffixAutomaton &self, int64_t state, int32_t limit) {
                std::vector<leapahead::Follower> found;
                self.followers(checked(self, state), limit, found);
                std::vector<std::pair<int32_t, int32_t>> pairs;
                for (const auto &[token, count] : found) pairs.emplace_back(token, count);
                return pairs;
            },
            "state"_a, "limit"_a)
        .def(
            "link", [](const SuffixAutomaton &self, int64_t state) { return self.link(checked(self, state)); },
            "state"_a)
        .def(
            "length", [](const SuffixAutomaton &self, int64_t state) { return self.length(checked(self, state)); },
            "state"_a)
        .def(
            "settled",
            [](const SuffixAutomaton &self, int64_t state, int32_t length) {
                return self.settled(checked(self, state), length);
            },
            "state"_a, "length"_a)
        .def(
            "advance",
            [](const SuffixAutomaton &self, int64_t state, int32_t length, int32_t token, int32_t max_links) {
                const auto found = self.advance(checked(self, state), length, token, max_links);
                return std::pair(found.state, found.length);
            },
            "state"_a, "length"_a, "token"_a, "max_links"_a = -1);
}

NB_MODULE(_native, m) {
    nb::set_leak_warnings(false);  // objects that live until the interpreter ends are no news to a user
    m.attr("INTERFACE") = kInterface;
    bind_suffix_automaton(m);
    bind_acceptance(m);
    bind_sources(m);
    bind_search(m);
    m.def("largest_at", &largest_at<float>, nb::arg("rows").noconvert(), "k"_a);
    m.def("largest_at", &largest_at<double>, nb::arg("rows").noconvert(), "k"_a);
    m.def("leaders", &leaders, "scores"_a, "seed"_a, "position"_a, "unusual"_a, "word"_a);
    m.def("words", &words, "seed"_a, "position"_a, "tokens"_a);
}
