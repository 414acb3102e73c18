#include "siblings.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace leapahead {

namespace {

constexpr double kAside = 0.2, kOlder = 0.3;
constexpr double kWeights[] = {0.2537, 0.9137, 1.9137, 3.9137};

// An upper bound of log(x), by 0.06 at most: the bits of a number, read as an integer, are about linear in its
// logarithm.
double log_bound(double x) {
    constexpr double kLog2 = 0.6931471805599454;
    int64_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return (static_cast<double>(bits) * 0x1p-52 - (1023.0 - 0.0861)) * kLog2;
}

size_t hashed(int32_t token) { return static_cast<uint32_t>(token) * 0x9E3779B1u >> 7; }

}  // namespace

void Siblings::Row::begin(int64_t at) {
    constexpr size_t kFirstPlaces = 128;
    position = at;
    weights_.clear();
    candidates_.clear();
    best_.clear();
    places_.assign(std::max(kFirstPlaces, places_.size()), -1);
}

void Siblings::Row::add(const int64_t *tokens, const double *chances, int count, double sum, double weight) {
    candidates_.clear();
    best_.clear();
    while (2 * (weights_.size() + static_cast<size_t>(count)) > places_.size()) grow();
    const size_t mask = places_.size() - 1;
    for (int i = 0; i < count; ++i) {
        const auto token = static_cast<int32_t>(tokens[i]);
        const double added = weight * (chances[i] / sum);
        size_t place = hashed(token) & mask;
        while (places_[place] >= 0 && weights_[places_[place]].first != token) place = (place + 1) & mask;
        if (places_[place] >= 0) {
            weights_[places_[place]].second += added;
        } else {
            places_[place] = static_cast<int32_t>(weights_.size());
            weights_.emplace_back(token, 0.0 + added);
        }
    }
}

void Siblings::Row::grow() {
    places_.assign(2 * places_.size(), -1);
    const size_t mask = places_.size() - 1;
    for (size_t i = 0; i < weights_.size(); ++i) {
        size_t place = hashed(weights_[i].first) & mask;
        while (places_[place] >= 0) place = (place + 1) & mask;
        places_[place] = static_cast<int32_t>(i);
    }
}

void Siblings::Row::age(double factor) {
    candidates_.clear();
    best_.clear();
    for (auto &[token, weight] : weights_) weight *= factor;
}

double Siblings::Row::total() const {
    double total = 0.0;
    for (const auto &[token, weight] : weights_) total += weight;
    return total;
}

Candidate Siblings::Row::candidate(int index, double total) const {
    Feature feature;
    feature.append(bisect_left(kWeights, total));
    const auto &[token, weight] = weights_[index];
    return {token, std::log(weight / total), feature, 0.0, false};
}

const std::vector<Candidate> &Siblings::Row::candidates(int most) {
    if (!candidates_.empty() && most <= most_) return candidates_;
    chosen_.clear();
    for (int i = 0; i < static_cast<int>(weights_.size()); ++i) {  // of equal weights the token that came first
        const double weight = weights_[i].second;
        if (chosen_.size() == static_cast<size_t>(most)) {
            if (most == 0 || weight <= weights_[chosen_.back()].second) continue;
            chosen_.pop_back();
        }
        auto place = chosen_.end();
        while (place != chosen_.begin() && weights_[*(place - 1)].second < weight) --place;
        chosen_.insert(place, i);
    }
    candidates_.clear();
    const double sum = total();
    for (const int each : chosen_) candidates_.push_back(candidate(each, sum));
    most_ = most;
    return candidates_;
}

const std::vector<Candidate> &Siblings::Row::best(int limit, const Scoring &score) {
    if (!best_.empty() && limit_ == limit) return best_;
    const double sum = total();
    TopScored top(score, limit, scored_);
    top.offer(
        static_cast<int>(weights_.size()), [&](int i) { return weights_[i].first; },
        [&](int i) { return std::log(weights_[i].second / sum); },
        [&](int i) { return log_bound(weights_[i].second / sum); });
    best_.clear();
    for (const auto &[value, i] : scored_) {
        best_.push_back(candidate(i, sum));
        best_.back().score = value;
        best_.back().scored = true;
    }
    limit_ = limit;
    return best_;
}

Siblings::Row &Siblings::at(int64_t position) {
    for (size_t i = 0; i < size_; ++i)
        if (rows_[i].position == position) return rows_[i];
    if (size_ == rows_.size()) rows_.emplace_back();
    rows_[size_].begin(position);
    return rows_[size_++];
}

int Siblings::wanted(const Outcome &outcome) const {
    const auto first = static_cast<int64_t>(outcome.length) - outcome.position - 1;  // the least depth
    const bool any = std::any_of(outcome.depths.begin() + 1, outcome.depths.end(), [&](int d) { return d >= first; });
    return any ? k_ : 0;
}

void Siblings::observe(const Outcome &outcome) {
    const auto length = static_cast<int64_t>(outcome.length);
    const auto end = rows_.begin() + static_cast<std::ptrdiff_t>(size_);
    size_ = std::partition(rows_.begin(), end, [&](const Row &row) { return row.position >= length; }) - rows_.begin();
    for (size_t i = 0; i < size_; ++i) rows_[i].age(kOlder);
    const int nodes = static_cast<int>(outcome.depths.size());
    std::vector<bool> below(nodes);  // the end of the committed path, and what is below it
    below[outcome.path.back()] = true;
    for (int node = 1; node < nodes; ++node) {
        if (below[outcome.parents[node]]) below[node] = true;
        const int64_t position = outcome.position + outcome.depths[node] + 1;
        if (position < length) continue;
        Row &row = at(position);
        const double weight = below[node] ? 1.0 : kAside;
        const int64_t *tokens = outcome.following + node * outcome.width;
        const auto [chances, sum] = outcome.chances(static_cast<size_t>(node), k_);
        row.add(tokens, chances, k_, sum, weight);
    }
}

Siblings::Row *Siblings::find(int state) {
    for (size_t i = 0; i < size_; ++i)
        if (rows_[i].position == end_ + state) return &rows_[i];
    return nullptr;
}

void Siblings::candidates(int state, int limit, std::vector<Candidate> &found) {
    if (Row *row = find(state)) {
        const auto &known = row->candidates(limit);
        found.insert(found.end(), known.begin(), known.begin() + std::min(static_cast<size_t>(limit), known.size()));
    }
}

void Siblings::seed_aware_candidates(int state, int limit, const Scoring &score, std::vector<Candidate> &found) {
    if (Row *row = find(state)) {
        const auto &known = row->best(limit, score);
        found.insert(found.end(), known.begin(), known.end());
    }
}

}  // namespace leapahead
