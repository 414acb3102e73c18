// An online suffix automaton over token ids: src/leapahead/drafters/sources/suffix_automaton.py, compiled.
//
// State for state and follower for follower the same as the Python class, which says what it is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "huge_pages.h"
#include "prefetch.h"

namespace leapahead {

struct Match {
    int32_t state;
    int32_t length;
};

struct Follower {
    int32_t token;
    int32_t count;
};

// The transitions of a state that has several, in the order in which their tokens were first seen.
class Branches {
  public:
    int32_t find(int32_t token) const;  // -1 for none
    void set(int32_t token, int32_t state);
    size_t size() const { return targets_.size(); }
    std::pair<int32_t, int32_t> at(size_t place) const { return targets_[place]; }
    // Tells the processor that a token will be looked for.
    void prefetch(int32_t token) const {
        if (!places_.empty()) leapahead::prefetch(&places_[hashed(token) & (places_.size() - 1)]);
    }

  private:
    static constexpr size_t kSearched = 8;  // as many are searched one by one; more have an index

    struct Place {
        int32_t token = -1, target = -1;  // of targets_; -1 where the place is free
        int32_t state = -1;               // that of the target, so that targets_ is not read
    };
    static size_t hashed(int32_t token) { return static_cast<uint32_t>(token) * 0x9E3779B1u >> 7; }
    size_t place(int32_t token) const;  // in places_, or the free one where it would be
    void index();

    std::vector<std::pair<int32_t, int32_t>> targets_;  // (token, state)
    Table<Place> places_;                               // open addressing; empty where there is no index
};

class SuffixAutomaton {
  public:
    SuffixAutomaton();

    void add(int32_t token);
    void restart() { last_ = 0; }

    // -1 where there is none.
    int32_t step(int32_t state, int32_t token) const {
        const State &at = states_[state];
        if (at.token == token) return at.target;
        return at.token == kSeveral ? branches_[at.target].find(token) : -1;
    }
    // At most `limit` of them are added to `found`.
    void followers(int32_t state, int32_t limit, std::vector<Follower> &found) const;
    // Tells the processor that `step` will fall back on the initial state,
    void prefetch(int32_t token) const {
        if (states_[0].token == kSeveral) branches_[states_[0].target].prefetch(token);
    }
    // or that the followers of a state will be asked for: in two stages, the second of which reads what the first has
    // asked for.
    void prefetch_followers(int32_t state, int stage) const;
    int32_t settled(int32_t state, int32_t length) const;
    Match advance(int32_t state, int32_t length, int32_t token, int32_t max_links = -1) const;

    int32_t link(int32_t state) const { return states_[state].link; }
    int32_t length(int32_t state) const { return states_[state].length; }
    int32_t end() const { return states_[last_].link > 0 ? states_[last_].link : 0; }
    int64_t size() const { return static_cast<int64_t>(states_.size()); }
    int64_t tokens() const { return tokens_; }

  private:
    static constexpr int32_t kNone = -1, kSeveral = -2;  // of State::token
    static constexpr int kCountLinks = 8;

    struct State {
        int32_t link, length, count;
        int32_t token;   // of its only transition, kNone, or kSeveral
        int32_t target;  // of that transition; the place in branches_ of several
    };

    void set(int32_t state, int32_t token, int32_t target);
    int32_t create(int32_t length, int32_t link);
    int32_t split(int32_t state, int32_t token, int32_t target);

    Table<State> states_;
    Table<Branches> branches_;
    int32_t last_ = 0;
    int64_t tokens_ = 0;
};

}  // namespace leapahead
