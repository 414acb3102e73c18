#include "suffix_automaton.h"

namespace leapahead {

size_t Branches::place(int32_t token) const {
    const size_t mask = places_.size() - 1;
    size_t at = hashed(token) & mask;
    while (places_[at].token != token && places_[at].target >= 0) at = (at + 1) & mask;
    return at;
}

int32_t Branches::find(int32_t token) const {
    if (!places_.empty()) return places_[place(token)].state;
    for (const auto &[known, state] : targets_)
        if (known == token) return state;
    return -1;
}

void Branches::set(int32_t token, int32_t state) {
    if (!places_.empty()) {
        Place &found = places_[place(token)];
        if (found.target >= 0) {
            targets_[found.target].second = found.state = state;
            return;
        }
        found = {token, static_cast<int32_t>(targets_.size()), state};
    } else {
        for (auto &[known, target] : targets_) {
            if (known == token) {
                target = state;
                return;
            }
        }
    }
    targets_.emplace_back(token, state);
    if (targets_.size() > kSearched && 2 * targets_.size() > places_.size()) index();
}

void Branches::index() {
    size_t size = 32;
    while (size < 4 * targets_.size()) size *= 2;
    places_.assign(size, Place());
    for (size_t target = 0; target < targets_.size(); ++target)
        places_[place(targets_[target].first)] = {targets_[target].first, static_cast<int32_t>(target),
                                                  targets_[target].second};
}

SuffixAutomaton::SuffixAutomaton() { states_.push_back({-1, 0, 0, kNone, 0}); }

void SuffixAutomaton::followers(int32_t state, int32_t limit, std::vector<Follower> &found) const {
    const State &at = states_[state];
    if (at.token == kNone) return;
    if (at.token != kSeveral) {
        found.push_back({at.token, states_[at.target].count});
        return;
    }
    const Branches &targets = branches_[at.target];
    const size_t size = targets.size(), wanted = limit > 0 ? limit : 0;
    const size_t late = size <= wanted ? 0 : wanted / 2;  // of those seen last, the latest first
    const size_t early = size <= wanted ? size : wanted - late;
    for (size_t place = 0; place < early + late; ++place) {
        const auto [token, target] = targets.at(place < early ? place : size - 1 - (place - early));
        found.push_back({token, states_[target].count});
    }
}

void SuffixAutomaton::prefetch_followers(int32_t state, int stage) const {
    const State &at = states_[state];
    if (stage == 0) return leapahead::prefetch(&at);
    if (at.token == kSeveral) leapahead::prefetch(&branches_[at.target]);
    if (at.token >= 0) leapahead::prefetch(&states_[at.target]);
    if (at.link > 0) leapahead::prefetch(&states_[at.link]);
}

int32_t SuffixAutomaton::settled(int32_t state, int32_t length) const {
    while (state > 0 && length <= states_[states_[state].link].length) state = states_[state].link;
    return state;
}

Match SuffixAutomaton::advance(int32_t state, int32_t length, int32_t token, int32_t max_links) const {
    state = settled(state, length);
    int32_t target;
    while ((target = step(state, token)) < 0) {
        if (state == 0) return {0, 0};
        state = --max_links ? states_[state].link : 0;
        length = states_[state].length;
    }
    return {target, length + 1};
}

void SuffixAutomaton::add(int32_t token) {
    ++tokens_;
    int32_t state = last_, current = 0;
    int32_t target = step(state, token);
    if (target < 0) {
        current = create(states_[state].length + 1, 0);
        while (state >= 0 && (target = step(state, token)) < 0) {
            set(state, token, current);
            state = states_[state].link;
        }
    }
    if (target >= 0) {  // a suffix of the text occurred before, or the whole text is the beginning of another
        if (states_[state].length + 1 != states_[target].length) target = split(state, token, target);
        if (current)
            states_[current].link = target;
        else
            current = target;
    }
    last_ = current;
    for (int links = 0; links < kCountLinks && current > 0; ++links) {
        ++states_[current].count;
        current = states_[current].link;
    }
}

void SuffixAutomaton::set(int32_t state, int32_t token, int32_t target) {
    State &at = states_[state];
    if (at.token == kSeveral) {
        branches_[at.target].set(token, target);
    } else if (at.token == kNone || at.token == token) {
        at.token = token;
        at.target = target;
    } else {
        Branches several;
        several.set(at.token, at.target);
        several.set(token, target);
        at.token = kSeveral;
        at.target = static_cast<int32_t>(branches_.size());
        branches_.push_back(std::move(several));
    }
}

int32_t SuffixAutomaton::create(int32_t length, int32_t link) {
    states_.push_back({link, length, 0, kNone, 0});
    return static_cast<int32_t>(states_.size()) - 1;
}

int32_t SuffixAutomaton::split(int32_t state, int32_t token, int32_t target) {
    const int32_t clone = create(states_[state].length + 1, states_[target].link);
    states_[clone].count = states_[target].count;
    states_[clone].token = states_[target].token;
    states_[clone].target = states_[target].target;
    if (states_[target].token == kSeveral) {
        Branches copy = branches_[states_[target].target];
        states_[clone].target = static_cast<int32_t>(branches_.size());
        branches_.push_back(std::move(copy));
    }
    while (state >= 0 && step(state, token) == target) {
        set(state, token, clone);
        state = states_[state].link;
    }
    states_[target].link = clone;
    return clone;
}

}  // namespace leapahead
