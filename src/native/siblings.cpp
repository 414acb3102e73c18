#include "siblings.h"

#include <algorithm>
#include <cmath>

namespace leapahead {

namespace {

constexpr double kAside = 0.2, kOlder = 0.3;
constexpr double kWeights[] = {0.25, 0.9, 1.9, 3.9};

size_t hashed(int32_t token) { return static_cast<uint32_t>(token) * 0x9E3779B1u >> 7; }

}  // namespace

void Siblings::Row::add(int32_t token, double weight) {
    if (places_.empty()) {
        for (auto &[known, sum] : weights) {
            if (known == token) {
                sum += weight;
                return;
            }
        }
    } else {
        const size_t mask = places_.size() - 1;
        size_t place = hashed(token) & mask;
        for (; places_[place] >= 0; place = (place + 1) & mask) {
            auto &[known, sum] = weights[places_[place]];
            if (known == token) {
                sum += weight;
                return;
            }
        }
        places_[place] = static_cast<int32_t>(weights.size());
    }
    weights.emplace_back(token, 0.0 + weight);
    if (weights.size() > kSearched && 2 * weights.size() > places_.size()) index();
}

void Siblings::Row::index() {
    places_.assign(std::max<size_t>(128, 2 * places_.size()), -1);
    const size_t mask = places_.size() - 1;
    for (size_t i = 0; i < weights.size(); ++i) {
        size_t place = hashed(weights[i].first) & mask;
        while (places_[place] >= 0) place = (place + 1) & mask;
        places_[place] = static_cast<int32_t>(i);
    }
}

Siblings::Row &Siblings::at(int64_t position) {
    for (Row &row : rows_)
        if (row.position == position) return row;
    rows_.emplace_back(position);
    return rows_.back();
}

bool Siblings::age(int64_t length, int64_t position, const std::vector<int> &depths) {
    rows_.erase(std::remove_if(rows_.begin(), rows_.end(), [&](const Row &row) { return row.position < length; }),
                rows_.end());
    for (Row &row : rows_) row.age(kOlder);
    return std::any_of(depths.begin() + 1, depths.end(), [&](int depth) { return position + depth + 1 >= length; });
}

void Siblings::observe(int64_t length, int64_t position, const std::vector<int> &parents,
                       const std::vector<int> &depths, int last, const int64_t *following, const double *logits,
                       size_t width) {
    const int nodes = static_cast<int>(depths.size());
    std::vector<bool> below(nodes);  // the end of the committed path, and what is below it
    below[last] = true;
    for (int node = 1; node < nodes; ++node)
        if (below[parents[node]]) below[node] = true;
    for (int node = 1; node < nodes; ++node) {
        if (position + depths[node] + 1 < length) continue;
        Row &row = at(position + depths[node] + 1);
        const double weight = below[node] ? 1.0 : kAside;
        const int64_t *tokens = following + node * width;
        const double *values = logits + node * width;
        double sum = 0.0;
        for (int i = 0; i < k_; ++i) sum += std::exp(values[i] - values[0]);
        const double log_sum = std::log(sum);
        for (int i = 0; i < k_; ++i)
            row.add(static_cast<int32_t>(tokens[i]), weight * std::exp(values[i] - values[0] - log_sum));
    }
}

double Siblings::choose(int state, int limit, Feature &feature) {
    const int64_t position = end_ + state;
    chosen_.clear();
    for (const Row &row : rows_) {
        if (row.position != position) continue;
        double total = 0.0;
        for (const auto &[token, weight] : row.weights) total += weight;
        chosen_ = row.weights;
        std::stable_sort(chosen_.begin(), chosen_.end(),
                         [](const auto &a, const auto &b) { return a.second > b.second; });
        if (chosen_.size() > static_cast<size_t>(limit)) chosen_.resize(limit);
        feature.append(bisect_left(kWeights, total));
        return total;
    }
    return 0.0;
}

void Siblings::candidates(int state, int limit, std::vector<Candidate> &found) {
    Feature feature;
    const double total = choose(state, limit, feature);
    for (const auto &[token, weight] : chosen_) found.push_back({token, std::log(weight / total), feature, 0.0, false});
}

void Siblings::seed_aware_candidates(int state, int limit, const Scoring &score, std::vector<Candidate> &found) {
    Feature feature;
    const double total = choose(state, 4 * kSampled, feature);
    TopScored top(score, limit, scored_);
    for (size_t i = 0; i < chosen_.size(); ++i)
        top.offer(chosen_[i].first, std::log(chosen_[i].second / total), static_cast<int>(i));
    for (const auto &[value, i] : scored_)
        found.push_back({chosen_[i].first, std::log(chosen_[i].second / total), feature, value, true});
}

}  // namespace leapahead
