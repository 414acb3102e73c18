// Sources of the compiled search. What reads a text gets lists of its last tokens.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>

#include "bindings.h"
#include "python_source.h"
#include "recycling.h"
#include "siblings.h"
#include "suffix.h"
#include "token_table.h"

namespace nb = nanobind;
using namespace nb::literals;
using leapahead::Adjacency;
using leapahead::Context;
using leapahead::HashedContext;
using leapahead::Recycling;
using leapahead::Siblings;
using leapahead::Source;
using leapahead::Suffix;
using leapahead::SuffixAutomaton;
using leapahead::TokenTable;

namespace {

template <typename T>
using Vector = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename T>
using NewVector = nb::ndarray<nb::numpy, T, nb::ndim<1>>;

template <typename T>
NewVector<T> to_numpy(std::vector<T> values) {
    auto *kept = new std::vector<T>(std::move(values));
    nb::capsule owner(kept, [](void *data) noexcept { delete static_cast<std::vector<T> *>(data); });
    return NewVector<T>(kept->data(), {kept->size()}, owner);
}

// Enters a row for a context of one or two tokens.
void put(Adjacency &adjacency, const Context &context, const Vector<int32_t> &tokens, const Vector<float> &logp,
         size_t first, size_t end) {
    std::vector<leapahead::Likely> row;
    for (size_t i = first; i < end; ++i) row.push_back({tokens(i), logp(i)});
    adjacency.put(HashedContext(context), context.size, {row.data(), static_cast<int>(row.size())});
}

void bind_adjacency(nb::module_ &m) {
    nb::class_<Adjacency>(m, "Adjacency")
        .def(nb::init<size_t>(), "capacity"_a)
        .def("__len__", [](const Adjacency &self) { return self.table().size(); })
        .def(
            "get",
            [](const Adjacency &self, const std::vector<int32_t> &key) -> nb::object {
                const int size = static_cast<int>(std::min<size_t>(key.size(), 2));
                const auto *found = self.find(HashedContext(Context::of(key.data() + key.size() - size, size)));
                if (found == nullptr) return nb::none();
                std::vector<int32_t> tokens;
                std::vector<float> logp;
                for (const leapahead::Likely &each : self.table().top_k(*found)) {
                    tokens.push_back(each.token);
                    logp.push_back(each.logp);
                }
                return nb::cast(std::make_pair(std::make_pair(to_numpy(tokens), to_numpy(logp)), found->context.size));
            },
            "key"_a)
        .def(
            "put",
            [](Adjacency &self, const std::vector<int32_t> &key, Vector<int32_t> tokens, Vector<float> logp) {
                if (key.empty() || key.size() > 2 || tokens.size() != logp.size())
                    throw nb::value_error("a context has one or two tokens, and as many log-probabilities as tokens");
                put(self, Context::of(key.data(), static_cast<int>(key.size())), tokens, logp, 0, tokens.size());
                self.drop_oldest();
            },
            "key"_a, "tokens"_a, "logp"_a)
        .def("arrays",
             [](const Adjacency &self) {
                 std::vector<int32_t> before, tokens, counts, following;
                 std::vector<float> logp;
                 self.table().each([&](const Context &context, leapahead::TopK row) {
                     before.push_back(context.size == 2 ? context.tokens[0] : -1);
                     tokens.push_back(context.tokens[context.size - 1]);
                     counts.push_back(static_cast<int32_t>(row.count));
                     for (const leapahead::Likely &each : row) {
                         following.push_back(each.token);
                         logp.push_back(each.logp);
                     }
                 });
                 return std::make_tuple(to_numpy(before), to_numpy(tokens), to_numpy(counts), to_numpy(following),
                                        to_numpy(logp));
             })
        .def(
            "merge",
            [](Adjacency &self, Vector<int32_t> before, Vector<int32_t> tokens, Vector<int32_t> counts,
               Vector<int32_t> following, Vector<float> logp) {
                Adjacency others(self.capacity());
                size_t first = 0;
                for (size_t i = 0; i < tokens.size(); ++i) {
                    const size_t end = first + static_cast<size_t>(counts(i));
                    if (end > following.size()) throw nb::value_error("the counts do not match the tokens");
                    const int32_t both[] = {before(i), tokens(i)};
                    put(others, before(i) < 0 ? Context::of(both + 1, 1) : Context::of(both, 2), following, logp, first,
                        end);
                    first = end;
                }
                self.merge(std::move(others));
            },
            "before"_a, "tokens"_a, "counts"_a, "following"_a, "logp"_a);
}

}  // namespace

void bind_sources(nb::module_ &m) {
    bind_adjacency(m);
    nb::class_<Source>(m, "Source").def_prop_ro("name", &Source::name);
    nb::class_<leapahead::PythonSource, Source>(m, "PythonSource")
        .def(nb::init<nb::object, nb::object>(), "source"_a, "sequence"_a)
        .def("state", &leapahead::PythonSource::state, "state"_a);
    nb::class_<Suffix, Source>(m, "Suffix")
        .def(nb::init<std::shared_ptr<SuffixAutomaton>>(), "automaton"_a)
        .def(
            "read",
            [](Suffix &self, const std::vector<int32_t> &last, size_t fresh,
               const std::optional<Suffix::Volumes> &volumes) {
                if (fresh > last.size()) throw nb::value_error("there are not so many tokens");
                self.read(last, fresh, volumes ? &*volumes : nullptr);
            },
            "last"_a, "fresh"_a, "volumes"_a.none());
    nb::class_<Recycling, Source>(m, "Recycling")
        .def(nb::init<int, int, std::shared_ptr<Adjacency>>(), "k"_a, "longest"_a, "shared"_a.none())
        .def("__len__", &Recycling::size)
        .def(
            "read_rows",
            [](Recycling &self, const std::vector<int32_t> &text, Matrix<int64_t> following, Matrix<double> logits) {
                const size_t rows = following.shape(0);
                const size_t columns = width(following, logits, rows, self.k());
                if (rows > text.size()) throw nb::value_error("there are more rows than tokens");
                std::vector<Context> contexts;
                std::vector<int> order;
                for (size_t row = 0; row < rows; ++row) {
                    const size_t end = text.size() - rows + row + 1;
                    const size_t size = std::min(end, static_cast<size_t>(self.longest()));
                    contexts.push_back(Context::of(text.data() + end - size, static_cast<int>(size)));
                    order.push_back(static_cast<int>(row));
                }
                self.keep(contexts, following.data(), logits.data(), columns, order);
            },
            "text"_a, "following"_a, "logits"_a);
    nb::class_<Siblings, Source>(m, "Siblings").def(nb::init<int>(), "k"_a).def("__len__", &Siblings::size);
    nb::class_<TokenTable, Source>(m, "TokenTable")
        .def(
            "__init__",
            [](TokenTable *self, nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu> tokens,
               nb::ndarray<const uint16_t, nb::ndim<2>, nb::c_contig, nb::device::cpu> logp) {
                if (tokens.shape(0) != logp.shape(0) || tokens.shape(1) != logp.shape(1))
                    throw nb::value_error("tokens and log-probabilities must be [vocab, k]");
                new (self) TokenTable(tokens.data(), logp.data(), tokens.shape(0), static_cast<int>(tokens.shape(1)));
            },
            // The arrays live as long as the table.
            "tokens"_a.noconvert(), "logp"_a.noconvert(), nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>());
}
