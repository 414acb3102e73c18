#include "search.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace leapahead {

namespace {

constexpr int kRootCandidates = 8, kCandidates = 4;  // of one source
constexpr int kWide = 256;                           // candidates of one source where some may be dropped
constexpr int kRanks = 5;
constexpr double kMost = 0.98, kOnlyMargin = 9.0;
constexpr int kNewtonSteps = 24;
constexpr double kNewtonLongest = 2.0, kNear = 0.005;
constexpr double kMostLogit = 7.0, kRate = 0.01;  // of the mixer
constexpr double kMargins[] = {-3.0, -1.5, -0.5, 0.0, 0.5, 1.5};
constexpr double kScores[] = {-5.0, -3.0, -2.0, -1.0, 0.0, 1.0};
// -log(0.999), -log(0.9), -log(0.75), -log(0.5), -log(0.25) and -log(0.1), as Python computes them.
constexpr double kShares[] = {0x1.064670d979b73p-10, 0x1.af8e8210a415cp-4, 0x1.269621134db92p-2,
                              0x1.62e42fefa39efp-1,  0x1.62e42fefa39efp+0, 0x1.26bb1bbb55515p+1};

}  // namespace

Search::Search(std::vector<std::shared_ptr<Source>> sources, std::shared_ptr<AcceptanceTable> table, Mode mode,
               uint64_t seed, double temperature, Correction correction, Filter filter)
    : sources_(std::move(sources)),
      table_(std::move(table)),
      mode_(mode),
      scoring_{seed, 0, temperature},
      correction_(correction),
      filter_(std::move(filter)) {
    for (const auto &source : sources_) {
        if (source->name() == Mixer::kLeading) leading_ = static_cast<int>(ids_.size());
        ids_.push_back(table_->source(source->name()));
    }
}

size_t Search::unread(size_t length) const {
    size_t most = 1;
    for (const auto &source : sources_) most = std::max(most, source->unread(length));
    return std::min(most, length);
}

void Search::begin(const Text &text, Limits limits) {
    limits_ = limits;
    scoring_.position = text.length;
    order_ = 0;
    leaves_ = 1;
    deepest_ = 0;
    states_.clear();
    heap_.clear();
    entries_.clear();
    guesses_.clear();
    opinions_.clear();
    asked_.clear();
    nodes_.assign(1, {text.last.back(), -1, 0, -1, 1.0, false, 0, 0, 0, 0});
    for (const auto &source : sources_) {
        source->read(text);
        states_.push_back(source->root());
    }
    push({-1.0, order_++, 0, -1, -1});
}

int Search::wanted(const Outcome &outcome) const {
    int most = 0;
    for (const auto &source : sources_) most = std::max(most, source->wanted(outcome));
    return most;
}

void Search::observe(const Outcome &outcome) {
    for (const int each : outcome.path) {
        if (each >= size()) continue;  // a node that the search has not made
        const Node &node = nodes_[each];
        for (int g = node.first_guess; g < node.end_guess; ++g)
            for (int o = guesses_[g].first_opinion; o < guesses_[g].end_opinion; ++o)
                table_->prefetch_prefixes(opinions_[o].key);
    }
    for (const auto &source : sources_) source->observe(outcome);
}

void Search::push(const Entry &entry) {
    heap_.push_back(entry);
    std::push_heap(heap_.begin(), heap_.end(), Later());
}

Search::Entry Search::pop() {
    const Entry entry = heap_.front();
    std::pop_heap(heap_.begin(), heap_.end(), Later());
    heap_.pop_back();
    if (entry.next >= 0) push(entries_[entry.next]);
    return entry;
}

double Search::next() {
    while (!heap_.empty() && heap_.front().guess < 0) {
        const Entry entry = pop();
        expand(entry.node, -entry.chance);
    }
    return bound();
}

std::optional<int32_t> Search::likeliest() const {
    const auto first = guesses_.begin() + nodes_[0].first_guess, end = guesses_.begin() + nodes_[0].end_guess;
    if (first == end) return std::nullopt;
    return std::max_element(first, end, [](const Guess &a, const Guess &b) { return a.p < b.p; })->token;
}

bool Search::take() {
    const Entry entry = pop();
    const Guess guess = guesses_[entry.guess];
    const bool second = nodes_[entry.node].inner;  // a second child adds a leaf
    if (size() > limits_.nodes || nodes_[entry.node].depth >= limits_.depth || (second && leaves_ >= limits_.leaves))
        return false;
    leaves_ += second;
    nodes_[entry.node].inner = true;
    const int depth = nodes_[entry.node].depth + 1, node = size();
    deepest_ = std::max(deepest_, depth);
    nodes_.push_back({guess.token, entry.node, depth, guess.source, -entry.chance, false, 0, 0, 0, 0});
    for (size_t i = 0; i < sources_.size(); ++i) {
        const int state = states_[static_cast<size_t>(entry.node) * sources_.size() + i];
        states_.push_back(state == Source::kNoState ? state : sources_[i]->follow(state, guess.token));
    }
    if (depth < limits_.depth) push({entry.chance, order_++, node, -1, -1});
    return true;
}

int Search::take_all(int nodes) {
    while (size() <= nodes && next() > 0.0) take();
    return size();
}

double Search::total(int node) const {
    double sum = 0.0;
    for (int i = nodes_[node].first_guess; i < nodes_[node].end_guess; ++i) sum += guesses_[i].p;
    return std::min(1.0, sum);
}

void Search::expand(int node, double chance) {
    const int depth = nodes_[node].depth, limit = depth == 0 ? kRootCandidates : kCandidates;
    const int first = static_cast<int>(guesses_.size()), first_asked = static_cast<int>(asked_.size());
    Scoring score = scoring_;
    score.position += static_cast<uint64_t>(depth);
    tokens_.clear();
    proposed_.clear();
    found_.clear();
    parameters_.clear();
    num_asked_ = 0;
    path_.clear();
    if (filter_) {
        for (int at = node; at > 0; at = nodes_[at].parent) path_.push_back(nodes_[at].token);
        std::reverse(path_.begin(), path_.end());
    }
    for (int stage = 0; stage < Source::kStages; ++stage)
        for (int i = 0; i < num_sources(); ++i)
            if (const int at = state(node, i); at != Source::kNoState) sources_[i]->prepare(at, stage);
    for (int i = 0; i < static_cast<int>(sources_.size()); ++i) {
        const int at = state(node, i);
        if (at == Source::kNoState || !ask(i, at, limit, score)) continue;
        asked_.push_back(i);
        ++num_asked_;
    }
    const int where = mixer_place(depth, first_asked, static_cast<int>(asked_.size()));
    for (int i = first_asked; i < static_cast<int>(asked_.size()); ++i)
        table_->mixer.parameters(mode_, where, ids_[asked_[i]]);  // all are there before their addresses are kept
    for (int i = first_asked; i < static_cast<int>(asked_.size()); ++i)
        parameters_.push_back(&table_->mixer.parameters(mode_, where, ids_[asked_[i]]));
    for (Found &each : found_) each.opinion.p = table_->probability(each.opinion.key, each.opinion.logit);
    for (int place = 0; place < static_cast<int>(proposed_.size()); ++place) guesses_.push_back(joined(place));
    Node &expanded = nodes_[node];
    expanded.first_guess = first;
    expanded.end_guess = static_cast<int>(guesses_.size());
    expanded.first_asked = first_asked;
    expanded.end_asked = static_cast<int>(asked_.size());
    // Sorted by counting those that come before each: few, and the branches of a sort could not be predicted.
    const int begin = static_cast<int>(entries_.size()), count = expanded.end_guess - first;
    chances_.clear();
    for (int i = 0; i < count; ++i) chances_.push_back(std::min(kMost, guesses_[first + i].p * correction_.factor()));
    make_exclusive();
    for (double &each : chances_) each = -chance * each;
    entries_.resize(entries_.size() + static_cast<size_t>(count));
    for (int i = 0; i < count; ++i) {
        int place = 0;
        for (int other = 0; other < count; ++other)
            place += (chances_[other] < chances_[i]) | ((chances_[other] == chances_[i]) & (other < i));
        const int next = place + 1 < count ? begin + place + 1 : -1;
        entries_[begin + place] = {chances_[i], order_ + i, node, first + i, next};
    }
    order_ += count;
    if (expanded.end_guess > first) push(entries_[begin]);
}

void Search::make_exclusive() {
    if (std::accumulate(chances_.begin(), chances_.end(), 0.0) <= kMost) return;
    odds_.clear();
    for (const double p : chances_) odds_.push_back(p / (1.0 - p));
    double share = 1.0;
    for (int step = 0; step < kNewtonSteps; ++step) {
        double sum = 0.0, slope = 0.0;
        for (const double p : chances_) {
            sum += p;
            slope += p * (1.0 - p);
        }
        if (std::abs(sum - kMost) < kNear) break;
        share *= std::exp(-std::min(std::max((sum - kMost) / slope, -kNewtonLongest), kNewtonLongest));
        for (size_t i = 0; i < odds_.size(); ++i) chances_[i] = share * odds_[i] / (1.0 + share * odds_[i]);
    }
}

void Search::filter(int limit) {
    if (!filter_ || candidates_.empty()) return;
    std::vector<int32_t> tokens;
    for (const Candidate &each : candidates_) tokens.push_back(each.token);
    const std::vector<bool> allowed = filter_(path_, tokens);
    size_t kept = 0;
    for (size_t i = 0; i < candidates_.size() && kept < static_cast<size_t>(limit); ++i)
        if (i < allowed.size() && allowed[i]) candidates_[kept++] = candidates_[i];
    candidates_.resize(kept);
}

bool Search::ask(int source, int state, int limit, const Scoring &score) {
    candidates_.clear();
    if (mode_ != Mode::sampled) {
        sources_[source]->candidates(state, filter_ ? kWide : limit, candidates_);
        filter(limit);
        for (int rank = 0; rank < static_cast<int>(candidates_.size()); ++rank) {
            const Candidate &each = candidates_[rank];
            Key key(ids_[source], static_cast<uint32_t>(mode_));
            key.append(std::min(rank, kRanks));
            if (each.feature.size > 0) key.append(each.feature.values[0]);
            key.append(bisect_left(kShares, -each.logp));
            for (int i = 1; i < each.feature.size; ++i) key.append(each.feature.values[i]);
            add(each.token, key);
        }
        return !candidates_.empty();
    }
    sources_[source]->seed_aware_candidates(state, filter_ ? kWide : limit, score, candidates_);
    filter(static_cast<int>(candidates_.size()));
    rank(source, limit, score);
    return !candidates_.empty();
}

void Search::rank(int source, int limit, const Scoring &score) {
    order_of_.clear();
    for (int i = 0; i < static_cast<int>(candidates_.size()); ++i) {
        Candidate &each = candidates_[i];
        if (!each.scored) each.score = score(each.token, each.logp);
        order_of_.push_back(i);
    }
    const auto greater = [&](int a, int b) {
        const double first = candidates_[a].score, second = candidates_[b].score;
        return first != second ? first > second : a < b;
    };
    const int kept = std::min(limit, static_cast<int>(order_of_.size()));
    if (!std::is_sorted(order_of_.begin(), order_of_.end(), greater))
        std::partial_sort(order_of_.begin(), order_of_.begin() + kept, order_of_.end(), greater);
    for (int rank = 0; rank < kept; ++rank) {
        const Candidate &each = candidates_[order_of_[rank]];
        const double other = kept > 1 ? candidates_[order_of_[rank == 0 ? 1 : 0]].score : 0.0;
        const double margin = kept > 1 ? each.score - other : kOnlyMargin;
        Key key(ids_[source], static_cast<uint32_t>(mode_));
        key.append(std::min(rank, kRanks));
        if (each.feature.size > 0) key.append(each.feature.values[0]);
        key.append(bisect_left(kScores, -each.score));
        key.append(bisect_left(kMargins, -margin));
        for (int i = 1; i < each.feature.size; ++i) key.append(each.feature.values[i]);
        add(each.token, key);
    }
}

void Search::add(int32_t token, Key key) {
    const int at = static_cast<int>(found_.size());
    size_t place = tokens_.size();  // if it is new
    for (size_t i = 0; i < tokens_.size(); ++i) place = tokens_[i] == token ? i : place;
    table_->prefetch(key);
    found_.push_back({{key, 0.0, 0.0, num_asked_}, -1});
    if (place == tokens_.size()) {
        tokens_.push_back(token);
        proposed_.push_back({at, at});
    } else if (Found &last = found_[proposed_[place].last]; last.opinion.asked == num_asked_) {
        last.opinion = found_.back().opinion;  // a source that names a token twice: the last one counts
        found_.pop_back();
    } else {
        last.next = at;
        proposed_[place].last = at;
    }
}

int Search::mixer_place(int depth, int first_asked, int end_asked) const {
    const auto end = asked_.begin() + end_asked;
    return Mixer::place(depth, std::find(asked_.begin() + first_asked, end, leading_) != end);
}

int Search::proposing(const Guess &guess) const {
    return std::min(guess.end_opinion - guess.first_opinion, Mixer::kMostProposing) - 1;
}

Search::Guess Search::joined(int place) {
    Guess guess{tokens_[place], 0.0, 0, static_cast<int>(opinions_.size()), 0};
    for (int at = proposed_[place].first; at >= 0; at = found_[at].next) opinions_.push_back(found_[at].opinion);
    guess.end_opinion = static_cast<int>(opinions_.size());
    const int index = proposing(guess), first_asked = static_cast<int>(asked_.size()) - num_asked_;
    double z = 0.0, greatest = -1.0;
    int next = guess.first_opinion;
    for (int i = 0; i < num_asked_; ++i) {
        const Mixer::Weights &weights = (*parameters_[i])[index];
        const bool proposes = next < guess.end_opinion && opinions_[next].asked == i;
        const Opinion &opinion = opinions_[proposes ? next : guess.first_opinion];
        const double spoken = weights.proposing * opinion.logit + weights.bias;
        z += proposes ? spoken : weights.silent;
        // The user's prediction where it proposes the token, so that reports tell how much of it came true.
        const bool is_leading = asked_[first_asked + i] == leading_,
                   is_greatest = proposes & (is_leading | (opinion.p > greatest));
        greatest = is_greatest ? (is_leading ? 2.0 : opinion.p) : greatest;
        guess.source = is_greatest ? asked_[first_asked + i] : guess.source;
        next += proposes;
    }
    z = std::min(std::max(z, -kMostLogit), kMostLogit);
    guess.p = 1.0 / (1.0 + std::exp(-z));
    return guess;
}

void Search::learn(const std::vector<int> &path, const std::vector<int32_t> &tokens) {
    const size_t count = std::min(path.size(), tokens.size());
    for (size_t i = 0; i < count; ++i) {
        if (path[i] < 0 || path[i] >= size()) continue;  // a node that the search has not made
        const Node &node = nodes_[path[i]];
        if (node.first_guess == node.end_guess) continue;
        bool any = false;
        double sum = 0.0;
        for (int g = node.first_guess; g < node.end_guess; ++g) {
            sum += guesses_[g].p;
            any |= guesses_[g].token == tokens[i];
        }
        correction_.learn(std::min(kMost, sum), any);
        for (int g = node.first_guess; g < node.end_guess; ++g)
            learn(node, guesses_[g], guesses_[g].token == tokens[i]);
    }
}

void Search::learn(const Node &node, const Guess &guess, bool hit) {
    const int index = proposing(guess);
    const double change = kRate * (hit - guess.p);
    const int place = mixer_place(node.depth, node.first_asked, node.end_asked);
    int next = guess.first_opinion;
    for (int i = 0; i < node.end_asked - node.first_asked; ++i) {
        const uint32_t id = ids_[asked_[node.first_asked + i]];
        Mixer::Weights &weights = table_->mixer.parameters(mode_, place, id)[index];
        if (next == guess.end_opinion || opinions_[next].asked != i) {
            weights.silent += change;
        } else {
            weights.proposing += change * opinions_[next++].logit;
            weights.bias += change;
        }
    }
    for (int o = guess.first_opinion; o < guess.end_opinion; ++o) {
        const Key key = opinions_[o].key;
        table_->learn(key, hit);
        const Source &source = *sources_[asked_[node.first_asked + opinions_[o].asked]];
        if (source.costs_forward() && key.value(2) == 0)
            table_->learn(Key(table_->source(source.name() + ", first choice"), static_cast<uint32_t>(mode_)), hit);
    }
}

}  // namespace leapahead
