#include "suffix.h"

#include <algorithm>
#include <cmath>

namespace leapahead {

namespace {

constexpr int kDraftLinks = 16, kLevels = 3, kMaxCandidates = 8;
constexpr double kBackOff = 0.3;
constexpr int kLengthBuckets[] = {1, 2, 3, 5, 8, 12, 20, 40};

}  // namespace

void Suffix::read(const std::vector<int32_t> &last, size_t fresh, const Volumes *volumes) {
    const size_t first = last.size() - fresh;
    for (size_t i = first; i < last.size(); ++i) own_->add(last[i]);
    for (Volume &volume : volumes_)
        for (size_t i = first; i < last.size(); ++i)
            volume.match = volume.automaton->advance(volume.match.state, volume.match.length, last[i]);
    if (volumes == nullptr) return;
    std::vector<Volume> present;
    for (const auto &[automaton, texts] : *volumes) {
        Volume volume{automaton, -1, {0, 0}};
        for (const Volume &former : volumes_)
            if (former.automaton == automaton) volume = former;
        if (volume.texts != texts) {
            Match found{0, 0};
            for (size_t i = last.size() - std::min(last.size(), kLocateTokens); i < last.size(); ++i)
                found = automaton->advance(found.state, found.length, last[i]);
            if (found.length > volume.match.length) volume.match = found;
            volume.texts = texts;
        }
        present.push_back(volume);
    }
    volumes_ = std::move(present);
}

int Suffix::root() {
    states_.clear();
    pending_.assign(1, kNone);
    states_.push_back({own_.get(), own_->end(), own_->length(own_->end())});
    for (const auto &[automaton, texts, match] : volumes_)
        states_.push_back({automaton.get(), automaton->settled(match.state, match.length), match.length});
    return 0;
}

int Suffix::follow(int state, int32_t token) {
    const size_t automata = 1 + volumes_.size(), first = state * automata;
    for (size_t i = first; i < first + automata; ++i) {
        const Place place = states_[i];
        states_.push_back(place);
    }
    pending_.push_back(token);  // few states are asked for candidates
    return static_cast<int>(pending_.size()) - 1;
}

void Suffix::prepare(int state, int stage) {
    const size_t automata = 1 + volumes_.size(), first = state * automata;
    for (size_t i = first; i < first + automata; ++i) {
        Place &place = states_[i];
        if (stage == 0) {
            if (pending_[state] != kNone) place.automaton->prefetch(pending_[state]);
            continue;
        }
        if (stage == 1 && pending_[state] != kNone) {
            const Match match = place.automaton->advance(place.state, place.length, pending_[state], kDraftLinks);
            place = {place.automaton, match.state, match.length};
        }
        if (place.length > 0) place.automaton->prefetch_followers(place.state, stage - 1);
    }
    if (stage == 1) pending_[state] = kNone;
}

void Suffix::candidates(int state, int limit, std::vector<Candidate> &found) {
    const int wanted = std::min(limit, kMaxCandidates);
    const size_t automata = 1 + volumes_.size(), first = state * automata;
    double factor = 1.0;
    weights_.clear();
    matches_.clear();
    for (size_t i = first; i < first + automata; ++i)
        if (states_[i].length > 0) matches_.push_back(states_[i]);
    for (int round = 0; round < kLevels && !matches_.empty() && static_cast<int>(weights_.size()) < wanted; ++round) {
        int longest = 0;
        for (const Place &match : matches_) longest = std::max(longest, match.length);
        level_.clear();  // matches of one length: the same suffix
        size_t kept = 0;
        for (const Place &match : matches_) {
            if (match.length == longest)
                level_.push_back(match);
            else
                matches_[kept++] = match;
        }
        matches_.resize(kept);
        count(std::max(wanted / static_cast<int>(level_.size()), 4));
        for (const Place &match : level_) {
            const int32_t link = match.automaton->link(match.state);
            if (link > 0) matches_.push_back({match.automaton, link, match.automaton->length(link)});
        }
        if (!counts_.empty()) {
            weigh(longest, factor);
            factor *= kBackOff;
        }
    }
    double total = 0.0;
    for (const Weighed &each : weights_) total += each.weight;
    for (auto next = weights_.begin(); next != weights_.end(); ++next)  // few; std::stable_sort would allocate memory
        std::rotate(std::upper_bound(weights_.begin(), next, *next,
                                     [](const Weighed &a, const Weighed &b) { return a.weight > b.weight; }),
                    next, next + 1);
    for (int i = 0; i < limit && i < static_cast<int>(weights_.size()); ++i)
        found.push_back({weights_[i].token, std::log(weights_[i].weight / total), weights_[i].feature, 0.0, false});
}

void Suffix::count(int limit) {
    counts_.clear();
    for (const Place &match : level_) {
        followers_.clear();
        match.automaton->followers(match.state, limit, followers_);
        for (const Follower &each : followers_) {
            const int32_t token = each.token, count = each.count ? each.count : 1;
            auto known =
                std::find_if(counts_.begin(), counts_.end(), [&](const Counted &c) { return c.token == token; });
            if (known != counts_.end())
                known->count += count;
            else
                counts_.push_back({token, count, match.automaton == own_.get()});
        }
    }
}

void Suffix::weigh(int length, double factor) {
    int64_t counted = 0;
    for (const Counted &each : counts_) counted += each.count;
    const int bucket = bisect_left(kLengthBuckets, length);
    const double share = factor / static_cast<double>(counted);
    for (const Counted &each : counts_) {
        const double weight = static_cast<double>(each.count) * share;
        auto known =
            std::find_if(weights_.begin(), weights_.end(), [&](const Weighed &w) { return w.token == each.token; });
        if (known != weights_.end()) {
            known->weight += weight;
        } else {
            Feature feature;
            feature.append(bucket);
            feature.append(static_cast<int>(std::min<int64_t>(each.count, 3)));
            feature.append(each.own);
            weights_.push_back({each.token, weight, feature});
        }
    }
}

}  // namespace leapahead
