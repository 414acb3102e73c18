// Acceptance estimates: keys in Python are tuples (source, mode, small integer, ...).
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <iterator>

#include "acceptance.h"
#include "bindings.h"

namespace nb = nanobind;
using namespace nb::literals;
using leapahead::AcceptanceTable;
using leapahead::Key;

namespace {

constexpr const char *kModes[] = {"greedy", "sampled", "unaware"};

uint32_t mode_of(nb::handle mode) {
    const auto name = nb::cast<std::string>(mode);
    for (uint32_t i = 0; i < std::size(kModes); ++i)
        if (name == kModes[i]) return i;
    throw nb::value_error("the second element of a key is greedy, sampled or unaware");
}

Key key_of(AcceptanceTable &table, nb::tuple key) {
    const size_t size = key.size();
    if (size < 1 || size > Key::kMost) throw nb::value_error("a key has from 1 to 11 elements");
    const uint32_t source = table.source(nb::cast<std::string>(key[0]));
    if (size == 1) return Key(source);
    Key found(source, mode_of(key[1]));
    for (size_t i = 2; i < size; ++i) {
        const int value = nb::cast<int>(key[i]);
        if (value < 0 || value >= Key::kValues) throw nb::value_error("the numbers of a key are from 0 to 31");
        found.append(static_cast<uint32_t>(value));
    }
    return found;
}

nb::tuple to_tuple(const AcceptanceTable &table, Key key) {
    nb::list found;
    found.append(table.name(key.source()));
    if (key.size() > 1) found.append(kModes[key.mode()]);
    for (int i = 2; i < key.size(); ++i) found.append(key.value(i));
    return nb::tuple(found);
}

using MixerRow = std::tuple<std::string, int, std::string, std::vector<std::vector<double>>>;

void set_mixer(AcceptanceTable &self, nb::handle mode, int place, const std::string &source,
               const std::vector<std::vector<double>> &values) {
    leapahead::Mixer::Row row{static_cast<leapahead::Mode>(mode_of(mode)), place, self.source(source), {}};
    if (place < 0 || place >= leapahead::Mixer::kPlaces || values.size() != row.parameters.size())
        throw nb::value_error("parameters of the mixer are [4, 3], at a place from 0 to 3");
    for (size_t i = 0; i < values.size(); ++i) {
        if (values[i].size() != 3) throw nb::value_error("parameters of the mixer are [4, 3]");
        row.parameters[i] = {values[i][0], values[i][1], values[i][2]};
    }
    self.mixer.set(row);
}

std::vector<MixerRow> mixer_rows(const AcceptanceTable &self) {
    std::vector<MixerRow> found;
    for (const auto &[mode, place, source, parameters] : self.mixer.rows()) {
        std::vector<std::vector<double>> values;
        for (const auto &each : parameters) values.push_back({each.proposing, each.bias, each.silent});
        found.emplace_back(kModes[static_cast<uint32_t>(mode)], place, self.name(source), values);
    }
    return found;
}

}  // namespace

void bind_acceptance(nb::module_ &m) {
    nb::class_<AcceptanceTable>(m, "AcceptanceTable")
        .def(nb::init<>())
        .def(
            "set_prior", [](AcceptanceTable &self, nb::tuple key, double p) { self.set_prior(key_of(self, key), p); },
            "key"_a, "estimate"_a)
        .def(
            "probability",
            [](AcceptanceTable &self, nb::tuple key) {
                double logit;
                return self.probability(key_of(self, key), logit);
            },
            "key"_a)
        .def(
            "estimate",
            [](AcceptanceTable &self, nb::tuple key, double unknown) {
                return self.estimate(key_of(self, key), unknown);
            },
            "key"_a, "unknown"_a)
        .def(
            "learn", [](AcceptanceTable &self, nb::tuple key, bool hit) { self.learn(key_of(self, key), hit); },
            "key"_a, "hit"_a)
        .def("set_mixer", &set_mixer, "mode"_a, "place"_a, "source"_a, "parameters"_a)
        .def("mixer_rows", &mixer_rows)
        .def("rows", [](const AcceptanceTable &self, int longest) {
            std::vector<std::tuple<nb::tuple, double, double, double>> found;
            for (const auto &[key, hits, trials, estimate] : self.rows(longest))
                found.emplace_back(to_tuple(self, key), hits, trials, estimate);
            return found;
        });
}
