// Seed-aware ranking: log p / T plus the Gumbel noise of a position.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <vector>

#include "philox.h"
#include "wide.h"

namespace leapahead {

struct Scored {
    double score;
    int index;
};

struct Scoring {
    uint64_t seed, position;
    double temperature;

    static double noise(uint32_t word) { return static_cast<float>(-std::log(-std::log((word + 0.5) * 0x1p-32))); }
    double operator()(int32_t token, double logp) const {
        return logp / temperature + noise(noise_word(seed, position, static_cast<uint32_t>(token)));
    }
};

// The candidates of greatest score. Noise rises with its word, so most candidates are refused by an upper bound of
// their noise, without a logarithm.
class TopScored {
  public:
    explicit TopScored(const Scoring &score, int limit, std::vector<Scored> &found)
        : score_(score), limit_(static_cast<size_t>(limit)), found_(found) {
        found_.clear();
    }

    // Offers `count` tokens, best in the order of falling log-probability: `token(i)` with `logp(i)`, of which
    // `most(i)` is an upper bound that is faster to compute.
    template <typename Token, typename Logp, typename Most>
    void offer(int count, Token token, Logp logp, Most most) {
        constexpr int kTogether = 32;  // words that are computed before the first of them is looked at
        uint32_t tokens[kTogether], words[kTogether];
        for (int first = 0; first < count; first += kTogether) {
            const int size = count - first < kTogether ? count - first : kTogether;
            for (int i = 0; i < size; ++i) tokens[i] = static_cast<uint32_t>(token(first + i));
            noise_words(score_.seed, score_.position, tokens, size, words);
            for (int i = 0; i < size; ++i)
                if (!refused(words[i], most(first + i))) enter(words[i], logp(first + i), first + i);
        }
    }
    template <typename Token, typename Logp>
    void offer(int count, Token token, Logp logp) {
        offer(count, token, logp, logp);
    }

  private:
    // For noise up to kFirst + i / kPerUnit, a word that certainly has no more.
    static constexpr double kFirst = -4.0, kPerUnit = 8.0;
    static constexpr int kBounds = 27 * 8;
    static const std::array<uint32_t, kBounds> kWords;

    // Whether the score is certainly not among the greatest; the log-probability is at most `most`.
    bool refused(uint32_t word, double most) const {
        if (found_.size() < limit_) return false;
        if (limit_ == 0) return true;
        const double place = (found_.back().score - most / score_.temperature - kFirst) * kPerUnit;
        return place >= 0.0 && word < kWords[place < kBounds ? static_cast<int>(place) : kBounds - 1];
    }
    void enter(uint32_t word, double logp, int index);

    const Scoring &score_;
    size_t limit_;
    std::vector<Scored> &found_;  // best first; of equal scores the one that was offered first
};

}  // namespace leapahead
