#include "scoring.h"

#include <array>

namespace leapahead {

namespace {

// For noise up to kFirst + i / kPerUnit, a word that certainly has no more.
constexpr double kFirst = -4.0, kPerUnit = 8.0, kMargin = 1e-3;
constexpr int kBounds = 27 * 8;

std::array<uint32_t, kBounds> bounds() {
    std::array<uint32_t, kBounds> found{};
    for (int i = 0; i < kBounds; ++i) {
        const double word = std::floor(std::exp(-std::exp(kMargin - (kFirst + i / kPerUnit))) * 0x1p32) - 2.0;
        found[i] = word > 0.0 ? static_cast<uint32_t>(word) : 0;
    }
    return found;
}

// Whether the noise of a word is certainly below a number.
bool is_below(uint32_t word, double noise) {
    static const std::array<uint32_t, kBounds> kept = bounds();
    const double place = (noise - kFirst) * kPerUnit;
    if (place < 0.0) return false;
    return word < kept[place < kBounds ? static_cast<int>(place) : kBounds - 1];
}

}  // namespace

void TopScored::offer(int32_t token, double logp, int index) {
    const uint32_t word = noise_word(score_.seed, score_.position, static_cast<uint32_t>(token));
    const double base = logp / score_.temperature;
    const bool full = found_.size() == limit_;
    if (full && (limit_ == 0 || is_below(word, found_.back().score - base))) return;
    const double score = base + Scoring::noise(word);
    if (full) {
        if (score <= found_.back().score) return;
        found_.pop_back();
    }
    auto place = found_.end();
    while (place != found_.begin() && (place - 1)->score < score) --place;
    found_.insert(place, {score, index});
}

}  // namespace leapahead
