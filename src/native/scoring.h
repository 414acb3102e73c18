// Seed-aware ranking: log p / T plus the Gumbel noise of a position.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "philox.h"

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

// The candidates of greatest score, of those that are offered in the order of falling log-probability. Noise rises with
// its word, so most candidates are refused by an upper bound of their noise, without a logarithm.
class TopScored {
  public:
    explicit TopScored(const Scoring &score, int limit, std::vector<Scored> &found)
        : score_(score), limit_(static_cast<size_t>(limit)), found_(found) {
        found_.clear();
    }

    void offer(int32_t token, double logp, int index);

  private:
    const Scoring &score_;
    size_t limit_;
    std::vector<Scored> &found_;  // best first; of equal scores the lower index
};

}  // namespace leapahead
