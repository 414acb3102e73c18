#include "token_table.h"

#include <algorithm>
#include <cstring>

#include "prefetch.h"

namespace leapahead {

namespace {

// Of the bits of an IEEE 754 half-precision number.
double half(uint16_t bits) {
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16, magnitude = bits & 0x7FFF;
    if (magnitude < 0x0400) {  // zero or subnormal
        const double value = magnitude * 0x1p-24;
        return sign ? -value : value;
    }
    const uint32_t exponent = magnitude >= 0x7C00 ? 0x7F800000 : ((magnitude >> 10) + 112) << 23;
    const uint32_t single = sign | exponent | (magnitude & 0x03FF) << 13;
    float value;
    std::memcpy(&value, &single, sizeof value);
    return value;
}

}  // namespace

int TokenTable::state(int32_t token) const {
    if (static_cast<uint32_t>(token) >= vocab_) return kNoState;
    return token;
}

void TokenTable::prepare(int state, int stage) {
    if (stage > 0) return;
    const size_t first = static_cast<size_t>(state) * k_;
    prefetch_all(tokens_ + first, tokens_ + first + k_);
    prefetch_all(logp_ + first, logp_ + first + k_);
}

void TokenTable::candidates(int state, int limit, std::vector<Candidate> &found) {
    const size_t first = static_cast<size_t>(state) * k_;
    for (int i = 0; i < std::min(limit, k_); ++i)
        found.push_back({tokens_[first + i], half(logp_[first + i]), {}, 0.0, false});
}

void TokenTable::seed_aware_candidates(int state, int limit, const Scoring &score, std::vector<Candidate> &found) {
    const size_t first = static_cast<size_t>(state) * k_;
    TopScored top(score, limit, scored_);
    top.offer(k_, [&](int i) { return tokens_[first + i]; }, [&](int i) { return half(logp_[first + i]); });
    for (const auto &[value, i] : scored_)
        found.push_back({tokens_[first + i], half(logp_[first + i]), {}, value, true});
}

}  // namespace leapahead
