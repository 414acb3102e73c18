// Token Recycling: src/leapahead/drafters/sources/recycling.py, compiled.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "contexts.h"
#include "source.h"

namespace leapahead {

// The section "recycling" of the drafter cache. Contexts have one or two tokens.
class Adjacency {
  public:
    explicit Adjacency(size_t capacity) : capacity_(capacity) {}

    // That of the last two tokens, else of the last one; null where there is neither.
    const ContextTable::Entry *find(const HashedContext &context) const;
    // Enters a copy of a row for the last tokens of a context, from `least` of them to two. Tokens that the model
    // excludes, whose log-probabilities are not finite, are left out: they are last.
    void put(const HashedContext &context, int least, TopK top_k);
    // As of ContextTable, for the last token and the last two.
    void prefetch(const HashedContext &context) const {
        for (int length = 1; length <= std::min(context.context.size, 2); ++length) table_.prefetch(context, length);
    }
    void prefetch_entry(const HashedContext &context) const {
        for (int length = 1; length <= std::min(context.context.size, 2); ++length)
            table_.prefetch_entry(context, length);
    }
    void drop_oldest() {
        if (table_.size() > capacity_) table_.drop(table_.size() - capacity_);
    }
    // Enters its own contexts after those of another one, as if they had been written later.
    void merge(Adjacency &&others);
    const ContextTable &table() const { return table_; }
    size_t capacity() const { return capacity_; }
    // Grows with every change. What `table` gave before is not valid afterwards.
    int64_t changes() const { return changes_; }

  private:
    size_t capacity_;
    ContextTable table_;
    int64_t changes_ = 0;
};

class Recycling : public Source {
  public:
    // Throws std::invalid_argument unless 1 <= longest <= Context::kMost.
    Recycling(int k, int longest, std::shared_ptr<Adjacency> shared);

    // Enters the rows of contexts, in this order: int64 [contexts, width] tokens and float64 [contexts, width] logits,
    // falling, of which k count.
    void keep(const std::vector<Context> &contexts, const int64_t *tokens, const double *logits, size_t width,
              const std::vector<int> &order);
    int k() const { return k_; }
    int longest() const { return longest_; }
    size_t size() const { return own_.size(); }

    size_t unread(size_t) const override { return static_cast<size_t>(longest_); }
    void read(const Text &text) override { end_ = context(text.last); }
    int wanted(const Outcome &) const override { return k_; }
    // Enters the rows of a step's nodes, those of the committed path last.
    void observe(const Outcome &outcome) override;
    int root() override;
    int follow(int state, int32_t token) override;
    void prepare(int state, int stage) override;
    void candidates(int state, int limit, std::vector<Candidate> &found) override;
    void seed_aware_candidates(int state, int limit, const Scoring &score, std::vector<Candidate> &found) override;

  private:
    static constexpr size_t kCapacity = 40000;

    struct State {
        Context context;
        TopK row;  // and its feature, once it is prepared
        Feature feature;
    };

    Context context(const std::vector<int32_t> &last) const;
    // The top-k tokens of the longest context that is known; of equally long ones the text's own.
    TopK find(const HashedContext &context, Feature &feature) const;
    // Finds the row and the feature of the state that is being prepared.
    void look_up(State &at);
    // A state that was prepared, with a row that is valid.
    const State &prepared(int state);
    // The two stages of reading ahead, see ContextTable.
    void prefetch(const HashedContext &context) const;
    void prefetch_entries(const HashedContext &context) const;
    // Enters `rows_` for `contexts_`, in this order.
    void enter(const std::vector<int> &order);
    // A new row of log-probabilities; `sum` is that of exp(logit - first logit).
    int32_t add(const int64_t *tokens, const double *logits, double sum);

    int k_, longest_;
    std::shared_ptr<Adjacency> shared_;
    ContextTable own_;
    int32_t num_steps_ = 0;
    Context end_;
    std::vector<State> states_;
    HashedContext prepared_{Context()};    // of the state that is being prepared
    int64_t changes_ = 0;                  // those of `shared_` when its row was found
    std::vector<HashedContext> contexts_;  // of one call, as the next: members so that their memory is kept
    std::vector<int32_t> rows_;
    std::vector<double> chances_;
    std::vector<Scored> scored_;
};

}  // namespace leapahead
