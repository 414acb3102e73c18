#include "recycling.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <stdexcept>

namespace leapahead {

namespace {

constexpr int64_t kAges[] = {1, 4, 16, 64};

}  // namespace

const ContextTable::Entry *Adjacency::find(const Context &context) const {
    for (int length = std::min(context.size, 2); length > 0; --length)
        if (const auto *found = table_.find(context.last(length))) return found;
    return nullptr;
}

void Adjacency::merge(const std::vector<std::pair<Context, Row>> &others) {
    Adjacency merged(capacity_);
    for (const auto &[context, row] : others) merged.put(context, row);
    merged.drop_oldest();
    table_.each([&](const ContextTable::Entry &entry) { merged.put(entry.context, entry.row); });
    merged.drop_oldest();
    table_ = std::move(merged.table_);
}

Recycling::Recycling(int k, int longest, std::shared_ptr<Adjacency> shared)
    : Source("recycling"), k_(k), longest_(longest), shared_(std::move(shared)) {
    if (longest < 1 || longest > Context::kMost) throw std::invalid_argument("the length of a context is from 1 to 4");
}

Context Recycling::context(const std::vector<int32_t> &last) const {
    const int size = std::min(static_cast<int>(last.size()), longest_);
    return Context::of(last.data() + last.size() - size, size);
}

void Recycling::keep(const std::vector<Context> &contexts, const int64_t *tokens, const double *logits, size_t width,
                     const std::vector<int> &order) {
    for (const int row : order) {
        const double *values = logits + static_cast<size_t>(row) * width;
        const int64_t *ids = tokens + static_cast<size_t>(row) * width;
        double sum = 0.0;
        for (int i = 0; i < k_; ++i) sum += std::exp(values[i] - values[0]);
        const double log_sum = std::log(sum);
        auto top_k = std::make_shared<TopK>(static_cast<size_t>(k_));
        for (int i = 0; i < k_; ++i)
            (*top_k)[i] = {static_cast<int32_t>(ids[i]), static_cast<float>(values[i] - values[0] - log_sum)};
        const Context &context = contexts[row];
        const Row entered = std::move(top_k);
        for (int length = context.size; length > 0; --length)
            own_.put(context.last(length), entered, num_steps_, false);
        if (shared_)
            for (int length = 1; length <= std::min(context.size, 2); ++length)
                shared_->put(context.last(length), entered);
    }
    if (own_.size() > kCapacity) own_.drop(kCapacity / 4);
    if (shared_) shared_->drop_oldest();
}

void Recycling::observe(const std::vector<int32_t> &last, const std::vector<int32_t> &tokens,
                        const std::vector<int> &parents, const std::vector<int> &path, const int64_t *following,
                        const double *logits, size_t width) {
    ++num_steps_;
    std::vector<Context> contexts{context(last)};
    for (size_t node = 1; node < tokens.size(); ++node)
        contexts.push_back(contexts[parents[node]].with(tokens[node], longest_));
    std::vector<int> order;
    for (int node = 0; node < static_cast<int>(tokens.size()); ++node)
        if (std::find(path.begin(), path.end(), node) == path.end()) order.push_back(node);
    order.insert(order.end(), path.begin(), path.end());
    keep(contexts, following, logits, width, order);
}

int Recycling::root() {
    states_.assign(1, end_);
    return 0;
}

int Recycling::follow(int state, int32_t token) {
    states_.push_back(states_[state].with(token, longest_));
    const Context &context = states_.back();
    for (int length = 1; length <= context.size; ++length) own_.prefetch(context.last(length));
    return static_cast<int>(states_.size()) - 1;
}

const TopK *Recycling::find(const Context &context, Feature &feature) const {
    const ContextTable::Entry *shared = nullptr;
    bool asked = false;
    for (int length = context.size; length > 0; --length) {
        if (length <= 2 && !asked && shared_) {
            shared = shared_->find(context);
            asked = true;
        }
        if (shared != nullptr && shared->context.size > length) break;
        if (const auto *found = own_.find(context.last(length))) {
            feature.append(length);
            int older = 0;
            for (const int64_t age : kAges) older += num_steps_ - found->number > age;
            feature.append(older);
            return found->row.get();
        }
    }
    if (shared == nullptr) return nullptr;
    feature.append(shared->context.size);
    feature.append(static_cast<int>(std::size(kAges)) + 1);
    return shared->row.get();
}

void Recycling::candidates(int state, int limit, std::vector<Candidate> &found) {
    Feature feature;
    const TopK *row = find(states_[state], feature);
    if (row == nullptr) return;
    const size_t count = std::min(row->size(), static_cast<size_t>(limit));
    for (size_t i = 0; i < count; ++i) found.push_back({(*row)[i].token, (*row)[i].logp, feature, 0.0, false});
}

void Recycling::seed_aware_candidates(int state, int limit, const Scoring &score, std::vector<Candidate> &found) {
    Feature feature;
    const TopK *row = find(states_[state], feature);
    if (row == nullptr) return;
    TopScored top(score, limit, scored_);
    for (size_t i = 0; i < row->size(); ++i) top.offer((*row)[i].token, (*row)[i].logp, static_cast<int>(i));
    for (const auto &[value, i] : scored_) found.push_back({(*row)[i].token, (*row)[i].logp, feature, value, true});
}

}  // namespace leapahead
