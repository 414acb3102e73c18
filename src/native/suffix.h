// Suffix matching: src/leapahead/drafters/sources/suffix.py, compiled.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "source.h"
#include "suffix_automaton.h"

namespace leapahead {

class Suffix : public Source {
  public:
    static constexpr size_t kLocateTokens = 32;

    explicit Suffix(std::shared_ptr<SuffixAutomaton> own) : Source("suffix"), own_(std::move(own)) {}

    using Volumes =
        std::vector<std::pair<std::shared_ptr<SuffixAutomaton>, int64_t>>;  // and the number of texts in each

    // Reads the tokens behind those that were read so far: `last` are the last ones of the whole text, at least
    // `fresh`, and LOCATE_TOKENS where volumes of past texts are given, which is necessary when they have changed.
    void read(const std::vector<int32_t> &last, size_t fresh, const Volumes *volumes);

    size_t unread(size_t length) const override { return length - static_cast<size_t>(own_->tokens()); }
    void read(const Text &text) override { read(text.last, unread(text.length), nullptr); }
    int root() override;
    int follow(int state, int32_t token) override;
    void prepare(int state, int stage) override;
    void candidates(int state, int limit, std::vector<Candidate> &found) override;

  private:
    struct Volume {
        std::shared_ptr<SuffixAutomaton> automaton;
        int64_t texts;
        Match match;
    };
    struct Place {  // a match in an automaton; a length of 0 is none
        const SuffixAutomaton *automaton;
        int32_t state, length;
    };
    struct Counted {
        int32_t token;
        int64_t count;
        bool own;
    };
    static constexpr int32_t kNone = -1;
    struct Weighed {
        int32_t token;
        double weight;
        Feature feature;
    };

    // Tokens that followed the matches of `level_`, all of one length, with their counts, into `counts_`.
    void count(int limit);
    // Adds what was counted after matches of a length to the weights.
    void weigh(int length, double factor);

    std::shared_ptr<SuffixAutomaton> own_;
    std::vector<Volume> volumes_;
    std::vector<Place> states_;     // one for each automaton and state
    std::vector<int32_t> pending_;  // of each state the token by which it is still to be advanced, or kNone
    // Of one call of `candidates`; members so that their memory is kept.
    std::vector<Place> matches_, level_;
    std::vector<Follower> followers_;
    std::vector<Counted> counts_;
    std::vector<Weighed> weights_;
};

}  // namespace leapahead
