#include "python_source.h"

#include <nanobind/stl/string.h>

#include <utility>

namespace nb = nanobind;

namespace leapahead {

PythonSource::PythonSource(nb::object source, nb::object sequence)
    : Source(nb::cast<std::string>(source.attr("name"))),
      source_(std::move(source)),
      sequence_(std::move(sequence)),
      costs_forward_(nb::cast<bool>(source_.attr("costs_forward"))) {}

int PythonSource::add(nb::object state) {
    if (state.is_none()) return kNoState;
    states_.push_back(std::move(state));
    return static_cast<int>(states_.size()) - 1;
}

int PythonSource::root() {
    states_.clear();
    return add(source_.attr("root")(sequence_));
}

int PythonSource::follow(int state, int32_t token) { return add(source_.attr("follow")(states_[state], token)); }

void PythonSource::candidates(int state, int limit, std::vector<Candidate> &found) {
    read(source_.attr("candidates")(states_[state], limit), found);
}

void PythonSource::seed_aware_candidates(int state, int limit, const Scoring &score, std::vector<Candidate> &found) {
    const nb::object partial = nb::module_::import_("functools").attr("partial");
    const nb::object scores = partial(sequence_.attr("scores"), score.position);
    read(source_.attr("seed_aware_candidates")(states_[state], limit, scores), found);
}

void PythonSource::read(nb::handle candidates, std::vector<Candidate> &found) const {
    const auto refuse = [this](const char *what, const char *expected) {
        const std::string problem = std::string(what) + " of the source '" + name() + "' is not " + expected;
        throw nb::value_error(problem.c_str());
    };
    for (nb::handle each : candidates) {
        Candidate candidate{0, 0.0, {}, 0.0, false};
        const nb::object token = each[0], logp = each[1], feature = each[2];
        if (!nb::try_cast(token, candidate.token) || !nb::try_cast(logp, candidate.logp))
            refuse("a candidate", "a token id with its log-probability");
        for (nb::handle value : feature) {
            int number = -1;
            if (!nb::try_cast(value, number) || candidate.feature.size == 4 || number < 0 || number > 31)
                refuse("a feature", "at most four integers from 0 to 31");
            candidate.feature.append(number);
        }
        found.push_back(candidate);
    }
}

}  // namespace leapahead
