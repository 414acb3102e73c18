// The token table: src/leapahead/drafters/sources/token_table.py, compiled.
#pragma once

#include <cstdint>
#include <vector>

#include "source.h"

namespace leapahead {

class TokenTable : public Source {
  public:
    // int32 [vocab, k] tokens and float16 [vocab, k] log-probabilities, likeliest first. The memory is the caller's.
    TokenTable(const int32_t *tokens, const uint16_t *logp, size_t vocab, int k)
        : Source("table"), tokens_(tokens), logp_(logp), vocab_(vocab), k_(k) {}

    void read(const Text &text) override { end_ = text.last.back(); }
    int root() override { return state(end_); }
    int follow(int, int32_t token) override { return state(token); }
    void prepare(int state, int stage) override;
    void candidates(int state, int limit, std::vector<Candidate> &found) override;
    void seed_aware_candidates(int state, int limit, const Scoring &score, std::vector<Candidate> &found) override;

  private:
    // A state is the last token.
    int state(int32_t token) const;

    const int32_t *tokens_;
    const uint16_t *logp_;
    size_t vocab_;
    int k_;
    int32_t end_ = -1;
    std::vector<Scored> scored_;  // of one call; a member so that its memory is kept
};

}  // namespace leapahead
