// Sibling rows: src/leapahead/drafters/sources/siblings.py, compiled.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "source.h"

namespace leapahead {

class Siblings : public Source {
  public:
    explicit Siblings(int k) : Source("siblings"), k_(k) {}

    int k() const { return k_; }
    size_t size() const { return size_; }
    void read(const Text &text) override { end_ = static_cast<int64_t>(text.length); }
    // Only nodes whose rows are about positions that are still to come.
    int wanted(const Outcome &outcome) const override;
    void observe(const Outcome &outcome) override;
    int root() override { return 0; }
    int follow(int state, int32_t) override { return state + 1; }
    void candidates(int state, int limit, std::vector<Candidate> &found) override;
    void seed_aware_candidates(int state, int limit, const Scoring &score, std::vector<Candidate> &found) override;

  private:
    // Token -> weight, in the order in which the tokens came.
    class Row {
      public:
        // Begins a position, in the memory of a former one.
        void begin(int64_t at);
        // Adds `weight` times `chances` / `sum` to the weights of `count` tokens.
        void add(const int64_t *tokens, const double *chances, int count, double sum, double weight);
        void age(double factor);
        // The first `most` tokens by falling weight, with their log-probabilities.
        const std::vector<Candidate> &candidates(int most);
        // Those with the greatest scores; all nodes at the position share them.
        const std::vector<Candidate> &best(int limit, const Scoring &score);

        int64_t position = 0;

      private:
        void grow();
        double total() const;
        // Of weights_[index].
        Candidate candidate(int index, double total) const;

        std::vector<std::pair<int32_t, double>> weights_;
        std::vector<int32_t> places_;               // open addressing: index into weights_, or -1
        std::vector<Candidate> candidates_, best_;  // empty where they must be made anew
        std::vector<int> chosen_;
        std::vector<Scored> scored_;
        int most_ = 0, limit_ = 0;  // of candidates_ and best_
    };

    Row &at(int64_t position);
    // Of a state; null where there is none.
    Row *find(int state);

    int k_;
    int64_t end_ = 0;
    std::vector<Row> rows_;  // the first size_ are in use
    size_t size_ = 0;
};

}  // namespace leapahead
