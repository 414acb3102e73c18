#include "scoring.h"

namespace leapahead {

const std::array<uint32_t, TopScored::kBounds> TopScored::kWords = [] {
    constexpr double kMargin = 1e-3;  // more than the rounding of noise and of the numbers that bound it
    std::array<uint32_t, kBounds> found{};
    for (int i = 0; i < kBounds; ++i) {
        const double word = std::floor(std::exp(-std::exp(kMargin - (kFirst + i / kPerUnit))) * 0x1p32) - 2.0;
        found[i] = word > 0.0 ? static_cast<uint32_t>(word) : 0;
    }
    return found;
}();

void TopScored::enter(uint32_t word, double logp, int index) {
    const double score = logp / score_.temperature + Scoring::noise(word);
    if (found_.size() == limit_) {
        if (score <= found_.back().score) return;
        found_.pop_back();
    }
    auto place = found_.end();
    while (place != found_.begin() && (place - 1)->score < score) --place;
    found_.insert(place, {score, index});
}

}  // namespace leapahead
