// A source that is written in Python, for the compiled search: draft models, datastores, sources of third parties.
#pragma once

#include <nanobind/nanobind.h>

#include <string>
#include <vector>

#include "source.h"

namespace leapahead {

class PythonSource : public Source {
  public:
    // `source` is a leapahead.planner.source.Source, `sequence` the SequenceView that it serves.
    PythonSource(nanobind::object source, nanobind::object sequence);

    nanobind::object state(int state) const { return states_[state]; }

    bool costs_forward() const override { return costs_forward_; }
    int root() override;
    int follow(int state, int32_t token) override;
    void candidates(int state, int limit, std::vector<Candidate> &found) override;
    void seed_aware_candidates(int state, int limit, const Scoring &score, std::vector<Candidate> &found) override;

  private:
    int add(nanobind::object state);
    void read(nanobind::handle candidates, std::vector<Candidate> &found) const;

    nanobind::object source_, sequence_;
    bool costs_forward_;
    std::vector<nanobind::object> states_;
};

}  // namespace leapahead
