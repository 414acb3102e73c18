// Token Recycling: src/leapahead/drafters/sources/recycling.py, compiled.
#pragma once

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
    const ContextTable::Entry *find(const Context &context) const;
    void put(const Context &context, const Row &row) { table_.put(context, row, 0, true); }
    void drop_oldest() {
        if (table_.size() > capacity_) table_.drop(table_.size() - capacity_);
    }
    // Enters other contexts as if they had been written before its own.
    void merge(const std::vector<std::pair<Context, Row>> &others);
    const ContextTable &table() const { return table_; }

  private:
    size_t capacity_;
    ContextTable table_;
};

class Recycling : public Source {
  public:
    // Throws std::invalid_argument unless 1 <= longest <= Context::kMost.
    Recycling(int k, int longest, std::shared_ptr<Adjacency> shared);

    // A text's last tokens before the next search.
    void set_end(const std::vector<int32_t> &last) { end_ = context(last); }
    // Enters the rows of contexts, in this order: int64 [contexts, width] tokens and float64 [contexts, width] logits,
    // falling, of which k count.
    void keep(const std::vector<Context> &contexts, const int64_t *tokens, const double *logits, size_t width,
              const std::vector<int> &order);
    // Enters the rows of a step's nodes, those of the committed path last. `last` are the tokens up to the root.
    void observe(const std::vector<int32_t> &last, const std::vector<int32_t> &tokens, const std::vector<int> &parents,
                 const std::vector<int> &path, const int64_t *following, const double *logits, size_t width);

    Context context(const std::vector<int32_t> &last) const;
    int k() const { return k_; }
    int longest() const { return longest_; }
    size_t size() const { return own_.size(); }

    int root() override;
    int follow(int state, int32_t token) override;
    void candidates(int state, int limit, std::vector<Candidate> &found) override;
    void seed_aware_candidates(int state, int limit, const Scoring &score, std::vector<Candidate> &found) override;

  private:
    static constexpr size_t kCapacity = 40000;

    // The top-k tokens of the longest context that is known; of equally long ones the text's own. Null for none.
    const TopK *find(const Context &context, Feature &feature) const;

    int k_, longest_;
    std::shared_ptr<Adjacency> shared_;
    ContextTable own_;
    int64_t num_steps_ = 0;
    Context end_;
    std::vector<Context> states_;
    std::vector<Scored> scored_;  // of one call; a member so that its memory is kept
};

}  // namespace leapahead
