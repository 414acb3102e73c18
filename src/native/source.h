// A provider of candidates for the tree search: src/leapahead/planner/source.py, compiled.
//
// The states of one search are numbered in the order in which they are made, and dropped when the next search begins.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "scoring.h"

namespace leapahead {

struct Feature {
    uint8_t size = 0;
    uint8_t values[4] = {};

    void append(int value) { values[size++] = static_cast<uint8_t>(value); }
};

struct Candidate {
    int32_t token;
    double logp;
    Feature feature;
    double score = 0.0;  // where a source has computed it already
    bool scored = false;
};

class Source {
  public:
    static constexpr int kNoState = -1;

    explicit Source(std::string name) : name_(std::move(name)) {}
    virtual ~Source() = default;

    const std::string &name() const { return name_; }
    virtual bool costs_forward() const { return false; }

    // Drops all states and gives the one after the last committed token, or kNoState.
    virtual int root() = 0;
    virtual int follow(int state, int32_t token) = 0;
    // Adds at most `limit` candidates to `found`, likeliest first.
    virtual void candidates(int state, int limit, std::vector<Candidate> &found) = 0;
    // Adds those for seed-aware drafting, in any order; the caller ranks them and keeps `limit`.
    virtual void seed_aware_candidates(int state, int limit, const Scoring &, std::vector<Candidate> &found) {
        candidates(state, limit > kNoiseCandidates ? limit : kNoiseCandidates, found);
    }

  protected:
    static constexpr int kNoiseCandidates = 32;

  private:
    std::string name_;
};

// The place of a value among rising edges, as Python's bisect_left.
template <typename T, size_t count>
int bisect_left(const T (&edges)[count], T value) {
    int place = 0;
    while (place < static_cast<int>(count) && edges[place] < value) ++place;
    return place;
}

}  // namespace leapahead
