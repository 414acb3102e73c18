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
    size_t size() const { return rows_.size(); }
    // The number of tokens of the text before the next search.
    void set_end(int64_t length) { end_ = length; }
    // Whether the rows of a step's nodes are wanted; first, those of passed positions are dropped, the others age.
    bool age(int64_t length, int64_t position, const std::vector<int> &depths);
    // Enters these: int64 [nodes, width] tokens and float64 [nodes, width] logits, falling, of which k count.
    void observe(int64_t length, int64_t position, const std::vector<int> &parents, const std::vector<int> &depths,
                 int last, const int64_t *following, const double *logits, size_t width);

    int root() override { return 0; }
    int follow(int state, int32_t) override { return state + 1; }
    void candidates(int state, int limit, std::vector<Candidate> &found) override;
    void seed_aware_candidates(int state, int limit, const Scoring &score, std::vector<Candidate> &found) override;

  private:
    static constexpr int kSampled = 32;

    // Token -> weight, in the order in which the tokens came.
    class Row {
      public:
        explicit Row(int64_t position) : position(position) {}

        void add(int32_t token, double weight);
        void age(double factor) {
            for (auto &[token, weight] : weights) weight *= factor;
        }

        int64_t position;
        std::vector<std::pair<int32_t, double>> weights;

      private:
        static constexpr size_t kSearched = 16;  // as many are searched one by one

        void index();

        std::vector<int32_t> places_;  // open addressing: index into weights, or -1
    };

    Row &at(int64_t position);
    // The first `limit` tokens of the state's row by falling weight, into `chosen_`; the sum of all weights, 0 for
    // none.
    double choose(int state, int limit, Feature &feature);

    int k_;
    int64_t end_ = 0;
    std::vector<Row> rows_;
    std::vector<std::pair<int32_t, double>> chosen_;  // of one call; members so that their memory is kept
    std::vector<Scored> scored_;
};

}  // namespace leapahead
