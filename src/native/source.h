// A provider of candidates for the tree search: src/leapahead/planner/source.py, compiled.
//
// The states of one search are numbered in the order in which they are made, and dropped when the next search begins.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "scoring.h"
#include "wide.h"

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

// A text before a search.
struct Text {
    size_t length;
    std::vector<int32_t> last;  // its last tokens: as many as the sources asked for, or all
};

// What the target chose after the nodes of a draft.
class Outcome {
  public:
    size_t length;              // of the text, with the committed tokens
    int64_t position;           // of the root
    std::vector<int32_t> last;  // tokens up to the root, as far as kContext
    std::vector<int32_t> tokens;
    std::vector<int> parents, depths, path;  // path: the committed nodes
    // [nodes, width]: the likeliest tokens after each node and their logits, falling, as many as the sources asked for.
    const int64_t *following = nullptr;
    const double *logits = nullptr;
    size_t width = 0;

    static constexpr int kContext = 4;

    struct Chances {
        const double *values;
        double sum;
    };
    // exp(logit - first logit) of the k likeliest tokens after a node, and the sum of them; computed once for one k.
    Chances chances(size_t node, int k) const {
        const auto count = static_cast<size_t>(k);
        if (kept_.size() != count * tokens.size()) {
            kept_.resize(count * tokens.size());
            sums_.assign(tokens.size(), 0.0);
        }
        double *values = kept_.data() + node * count;
        if (sums_[node] == 0.0) sums_[node] = exponentials(logits + node * width, k, values);
        return {values, sums_[node]};
    }

  private:
    mutable std::vector<double> kept_, sums_;  // 0 where they are not computed
};

class Source {
  public:
    static constexpr int kNoState = -1;

    explicit Source(std::string name) : name_(std::move(name)) {}
    virtual ~Source() = default;

    const std::string &name() const { return name_; }
    virtual bool costs_forward() const { return false; }

    // Reads a text before `root`; it may ask for as many of the last tokens as `unread` says.
    virtual size_t unread(size_t) const { return 0; }
    virtual void read(const Text &) {}
    // Learns from a draft. It needs as many of the likeliest tokens as `wanted` says; for 0 they may be missing.
    virtual int wanted(const Outcome &) const { return 0; }
    virtual void observe(const Outcome &) {}

    // Drops all states and gives the one after the last committed token, or kNoState.
    virtual int root() = 0;
    virtual int follow(int state, int32_t token) = 0;
    // Called with the stages from 0 to kStages - 1 before the candidates of a state are asked for. Each may ask for
    // memory (see prefetch.h) that is found through what the one before has asked for. `follow` asks for none: most
    // states of a greedy search are never asked for candidates.
    static constexpr int kStages = 3;
    virtual void prepare(int, int) {}
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

// The place of a value among rising edges, as Python's bisect_left. Without branches, which could not be predicted.
template <typename T, size_t count>
int bisect_left(const T (&edges)[count], T value) {
    int place = 0;
    for (const T edge : edges) place += edge < value;
    return place;
}

}  // namespace leapahead
