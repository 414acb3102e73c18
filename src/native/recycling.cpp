#include "recycling.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <stdexcept>

#include "wide.h"

namespace leapahead {

namespace {

constexpr int32_t kAges[] = {1, 4, 16, 64};

}  // namespace

const ContextTable::Entry *Adjacency::find(const HashedContext &context) const {
    for (int length = std::min(context.context.size, 2); length > 0; --length)
        if (const auto *found = table_.find(context, length)) return found;
    return nullptr;
}

void Adjacency::put(const HashedContext &context, int least, TopK top_k) {
    while (top_k.count > 0 && !std::isfinite(top_k[top_k.count - 1].logp)) --top_k.count;
    if (top_k.count == 0) return;
    ++changes_;
    const int32_t row = table_.rows.add(top_k.count);
    std::copy(top_k.begin(), top_k.end(), table_.rows.at(row));
    for (int length = least; length <= std::min(context.context.size, 2); ++length)
        table_.put(context, length, row, 0, true);
    table_.rows.release(row);
}

void Adjacency::merge(Adjacency &&others) {
    others.drop_oldest();
    table_.each([&](const Context &context, TopK top_k) { others.put(HashedContext(context), context.size, top_k); });
    others.drop_oldest();
    table_ = std::move(others.table_);
    ++changes_;
}

Recycling::Recycling(int k, int longest, std::shared_ptr<Adjacency> shared)
    : Source("recycling"), k_(k), longest_(longest), shared_(std::move(shared)) {
    if (longest < 1 || longest > Context::kMost) throw std::invalid_argument("the length of a context is from 1 to 4");
}

Context Recycling::context(const std::vector<int32_t> &last) const {
    const int size = std::min(static_cast<int>(last.size()), longest_);
    return Context::of(last.data() + last.size() - size, size);
}

void Recycling::prefetch(const HashedContext &context) const {
    for (int length = 1; length <= context.context.size; ++length) own_.prefetch(context, length);
    if (shared_) shared_->prefetch(context);
}

void Recycling::prefetch_entries(const HashedContext &context) const {
    for (int length = 1; length <= context.context.size; ++length) own_.prefetch_entry(context, length);
    if (shared_) shared_->prefetch_entry(context);
}

int32_t Recycling::add(const int64_t *tokens, const double *logits, double sum) {
    const double log_sum = std::log(sum);
    const int32_t row = own_.rows.add(k_);
    Likely *likely = own_.rows.at(row);
    for (int i = 0; i < k_; ++i)
        likely[i] = {static_cast<int32_t>(tokens[i]), static_cast<float>(logits[i] - logits[0] - log_sum)};
    return row;
}

void Recycling::keep(const std::vector<Context> &contexts, const int64_t *tokens, const double *logits, size_t width,
                     const std::vector<int> &order) {
    contexts_.clear();
    for (const Context &each : contexts) contexts_.emplace_back(each);
    for (const HashedContext &each : contexts_) prefetch(each);
    for (const HashedContext &each : contexts_) prefetch_entries(each);
    chances_.resize(static_cast<size_t>(k_));
    rows_.clear();
    for (size_t row = 0; row < contexts.size(); ++row) {
        const double *those = logits + row * width;
        rows_.push_back(add(tokens + row * width, those, exponentials(those, k_, chances_.data())));
    }
    enter(order);
}

void Recycling::enter(const std::vector<int> &order) {
    for (const int row : order) {
        const HashedContext &context = contexts_[row];
        for (int length = context.context.size; length > 0; --length)
            own_.put(context, length, rows_[row], num_steps_, false);
        if (shared_) shared_->put(context, 1, own_.rows.top_k(rows_[row]));
    }
    for (const int32_t row : rows_) own_.rows.release(row);
    if (own_.size() > kCapacity) own_.drop(kCapacity / 4);
    if (shared_) shared_->drop_oldest();
}

void Recycling::observe(const Outcome &outcome) {
    // What is written lies far apart in memory. So it is all asked for before the first of it is needed.
    contexts_.assign(1, HashedContext(context(outcome.last)));
    for (size_t node = 1; node < outcome.tokens.size(); ++node)
        contexts_.emplace_back(contexts_[outcome.parents[node]].context.with(outcome.tokens[node], longest_));
    for (const HashedContext &each : contexts_) prefetch(each);
    ++num_steps_;
    const int nodes = static_cast<int>(outcome.tokens.size());
    std::vector<int> order;
    for (int node = 0; node < nodes; ++node)
        if (std::find(outcome.path.begin(), outcome.path.end(), node) == outcome.path.end()) order.push_back(node);
    order.insert(order.end(), outcome.path.begin(), outcome.path.end());
    rows_.clear();
    for (size_t node = 0; node < outcome.tokens.size(); ++node) {
        const size_t first = node * outcome.width;
        rows_.push_back(add(outcome.following + first, outcome.logits + first, outcome.chances(node, k_).sum));
    }
    for (const HashedContext &each : contexts_) prefetch_entries(each);
    enter(order);
}

int Recycling::root() {
    states_.clear();
    states_.push_back({end_, {}, {}});
    return 0;
}

int Recycling::follow(int state, int32_t token) {
    states_.push_back({states_[state].context.with(token, longest_), {}, {}});
    return static_cast<int>(states_.size()) - 1;
}

void Recycling::prepare(int state, int stage) {
    State &at = states_[state];
    if (stage == 0) {
        prepared_ = HashedContext(at.context);
        return prefetch(prepared_);
    }
    if (stage == 1) return prefetch_entries(prepared_);
    look_up(at);
    prefetch_all(at.row.begin(), at.row.end());
}

void Recycling::look_up(State &at) {
    at.feature = Feature();
    at.row = find(prepared_, at.feature);
    if (shared_) changes_ = shared_->changes();
}

const Recycling::State &Recycling::prepared(int state) {
    State &at = states_[state];
    // While a source in Python was asked, another thread may have changed what several texts share.
    if (shared_ && shared_->changes() != changes_) look_up(at);
    return at;
}

TopK Recycling::find(const HashedContext &context, Feature &feature) const {
    const ContextTable::Entry *shared = nullptr;
    bool asked = false;
    for (int length = context.context.size; length > 0; --length) {
        if (length <= 2 && !asked && shared_) {
            shared = shared_->find(context);
            asked = true;
        }
        if (shared != nullptr && shared->context.size > length) break;
        if (const auto *found = own_.find(context, length)) {
            feature.append(length);
            int older = 0;
            for (const int32_t age : kAges) older += num_steps_ - found->number > age;
            feature.append(older);
            return own_.top_k(*found);
        }
    }
    if (shared == nullptr) return {};
    feature.append(shared->context.size);
    feature.append(static_cast<int>(std::size(kAges)) + 1);
    return shared_->table().top_k(*shared);
}

void Recycling::candidates(int state, int limit, std::vector<Candidate> &found) {
    const auto &[context, row, feature] = prepared(state);
    for (int i = 0; i < std::min(row.count, limit); ++i)
        found.push_back({row[i].token, row[i].logp, feature, 0.0, false});
}

void Recycling::seed_aware_candidates(int state, int limit, const Scoring &score, std::vector<Candidate> &found) {
    const auto &[context, row, feature] = prepared(state);
    TopScored top(score, limit, scored_);
    top.offer(row.count, [&](int i) { return row[i].token; }, [&](int i) { return row[i].logp; });
    for (const auto &[value, i] : scored_) found.push_back({row[i].token, row[i].logp, feature, value, true});
}

}  // namespace leapahead
