// The random words of leapahead.core.noise: numpy's Philox-4x64-10 with the key (seed, position).
//
//     token t  <-  half t % 2 of 64-bit word t / 2;   word w  <-  element w % 4 of the block of counter w / 4 + 1
#pragma once

#include <array>
#include <cstdint>

namespace leapahead {

inline uint64_t multiply_high(uint64_t a, uint64_t b) {
#ifdef __SIZEOF_INT128__
    return static_cast<uint64_t>((static_cast<unsigned __int128>(a) * b) >> 64);
#else
    const uint64_t low_a = a & 0xFFFFFFFF, high_a = a >> 32, low_b = b & 0xFFFFFFFF, high_b = b >> 32;
    const uint64_t middle = high_a * low_b + ((low_a * low_b) >> 32);
    const uint64_t carried = (middle & 0xFFFFFFFF) + low_a * high_b;
    return high_a * high_b + (middle >> 32) + (carried >> 32);
#endif
}

// Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).
constexpr int kPhiloxRounds = 10;
constexpr uint64_t kPhiloxMultiplier0 = 0xD2E7470EE14C6C93, kPhiloxMultiplier1 = 0xCA5A826395121157;
constexpr uint64_t kPhiloxWeyl0 = 0x9E3779B97F4A7C15, kPhiloxWeyl1 = 0xBB67AE8584CAA73B;

inline std::array<uint64_t, 4> philox_block(uint64_t seed, uint64_t position, uint64_t counter) {
    std::array<uint64_t, 4> x{counter, 0, 0, 0};
    for (int round = 0; round < kPhiloxRounds; ++round) {
        const uint64_t high0 = multiply_high(kPhiloxMultiplier0, x[0]), low0 = kPhiloxMultiplier0 * x[0];
        const uint64_t high1 = multiply_high(kPhiloxMultiplier1, x[2]), low1 = kPhiloxMultiplier1 * x[2];
        x = {high1 ^ x[1] ^ seed, low1, high0 ^ x[3] ^ position, low0};
        seed += kPhiloxWeyl0;
        position += kPhiloxWeyl1;
    }
    return x;
}

// The 32 random bits of a token at a position.
inline uint32_t noise_word(uint64_t seed, uint64_t position, uint32_t token) {
    const uint64_t word = philox_block(seed, position, token / 8 + 1)[token / 2 % 4];
    return static_cast<uint32_t>(token % 2 ? word >> 32 : word);
}

}  // namespace leapahead
