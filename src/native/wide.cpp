#include "wide.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

#include "philox.h"

#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__)
#include <immintrin.h>
#define LEAPAHEAD_AVX512 __attribute__((target("avx512f,avx512dq,avx512vl,avx512bw,prefer-vector-width=512")))
#endif
#if defined(__GNUC__)
#define LEAPAHEAD_INLINE inline __attribute__((always_inline))  // into functions for other processors, too
#else
#define LEAPAHEAD_INLINE inline
#endif

namespace leapahead {

namespace {

constexpr int kBlock = 8;  // tokens, whose words are those of one block

template <typename T>
struct Kept {
    T value;
    int index;

    // Whether it comes before another one.
    bool operator<(const Kept &other) const { return value != other.value ? value > other.value : index < other.index; }
};

constexpr int kColumns = 16, kSpan = 64;

// A number that at least k of `count` numbers reach: the k-th of the greatest numbers of parts of them. Negative
// infinity where there are too few numbers for that, or fewer than k that are greater.
template <typename T>
LEAPAHEAD_INLINE T reached(const T *numbers, int count, int k, std::vector<T> &greatest) {
    constexpr T kLeast = -std::numeric_limits<T>::infinity();
    const int groups = std::max(4, (4 * k + kColumns - 1) / kColumns), rows = count / (groups * kColumns);
    if (rows < 4) return kLeast;
    greatest.assign(static_cast<size_t>(groups * kColumns), kLeast);
    for (int group = 0; group < groups; ++group) {
        T most[kColumns];
        std::fill_n(most, kColumns, kLeast);
        const T *first = numbers + group * rows * kColumns;
        for (int row = 0; row < rows; ++row, first += kColumns)
            for (int i = 0; i < kColumns; ++i) most[i] = first[i] > most[i] ? first[i] : most[i];
        std::copy_n(most, kColumns, greatest.begin() + group * kColumns);
    }
    std::nth_element(greatest.begin(), greatest.begin() + k - 1, greatest.end(), std::greater<T>());
    return greatest[k - 1];
}

// See `largest_at`. Few numbers reach the bound that is found first, and most spans have none of these.
template <typename T>
LEAPAHEAD_INLINE void select_largest(const T *numbers, int count, int k, int64_t *indices, T *values) {
    constexpr T kLeast = -std::numeric_limits<T>::infinity();
    std::vector<T> greatest;
    const T bound = k > 0 ? reached(numbers, count, k, greatest) : kLeast;
    std::vector<Kept<T>> kept;
    int first = 0;
    for (; first + kSpan <= count; first += kSpan) {
        uint32_t wanted = 0;
        for (int i = 0; i < kSpan; ++i) wanted |= numbers[first + i] >= bound;
        for (int i = first; wanted && i < first + kSpan; ++i)
            if (numbers[i] >= bound && numbers[i] > kLeast) kept.push_back({numbers[i], i});
    }
    for (; first < count; ++first)
        if (numbers[first] >= bound && numbers[first] > kLeast) kept.push_back({numbers[first], first});
    for (int i = 0; static_cast<int>(kept.size()) < k; ++i)
        if (!(numbers[i] > kLeast)) kept.push_back({kLeast, i});
    std::partial_sort(kept.begin(), kept.begin() + k, kept.end());
    for (int i = 0; i < k; ++i) {
        indices[i] = kept[i].index;
        values[i] = kept[i].value;
    }
}

#ifdef LEAPAHEAD_AVX512

const bool kWide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                   __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw");
constexpr int kLanes = 16;  // words: two vectors, since one alone waits for its own multiplications

// Both halves of eight products, of products of 32 bits. By the instruction for these: of the same in C++ the compiler
// makes products of 64 bits, which are slower.
LEAPAHEAD_AVX512 inline __m512i multiply(__m512i x, uint64_t by, __m512i &low) {
    const __m512i low_by = _mm512_set1_epi64(static_cast<int64_t>(by)), high_by = _mm512_srli_epi64(low_by, 32);
    const __m512i high_x = _mm512_srli_epi64(x, 32), mask = _mm512_set1_epi64(0xFFFFFFFF);
    const __m512i lowest = _mm512_mul_epu32(x, low_by);  // of the lower 32 bits of each number
    const __m512i middle = _mm512_add_epi64(_mm512_mul_epu32(high_x, low_by), _mm512_srli_epi64(lowest, 32));
    const __m512i carried = _mm512_add_epi64(_mm512_mul_epu32(x, high_by), _mm512_and_si512(middle, mask));
    low = _mm512_or_si512(_mm512_slli_epi64(carried, 32), _mm512_and_si512(lowest, mask));
    return _mm512_add_epi64(_mm512_add_epi64(_mm512_mul_epu32(high_x, high_by), _mm512_srli_epi64(middle, 32)),
                            _mm512_srli_epi64(carried, 32));
}

// As philox_block: the four numbers of each of kLanes blocks, whose counters are in a.
LEAPAHEAD_AVX512 inline void wide_blocks(uint64_t seed, uint64_t position, uint64_t *a, uint64_t *b, uint64_t *c,
                                         uint64_t *d) {
    constexpr int kVectors = kLanes / 8;
    __m512i x[kVectors][4] = {};
    for (int i = 0; i < kVectors; ++i) x[i][0] = _mm512_loadu_si512(a + 8 * i);
    for (int round = 0; round < kPhiloxRounds; ++round) {
        const __m512i seeds = _mm512_set1_epi64(static_cast<int64_t>(seed));
        const __m512i positions = _mm512_set1_epi64(static_cast<int64_t>(position));
        for (auto &[x0, x1, x2, x3] : x) {
            __m512i low0, low1;
            const __m512i high0 = multiply(x0, kPhiloxMultiplier0, low0);
            const __m512i high1 = multiply(x2, kPhiloxMultiplier1, low1);
            x0 = _mm512_xor_si512(_mm512_xor_si512(high1, x1), seeds);
            x1 = low1;
            x2 = _mm512_xor_si512(_mm512_xor_si512(high0, x3), positions);
            x3 = low0;
        }
        seed += kPhiloxWeyl0;
        position += kPhiloxWeyl1;
    }
    for (int i = 0; i < kVectors; ++i) {
        _mm512_storeu_si512(a + 8 * i, x[i][0]);
        _mm512_storeu_si512(b + 8 * i, x[i][1]);
        _mm512_storeu_si512(c + 8 * i, x[i][2]);
        _mm512_storeu_si512(d + 8 * i, x[i][3]);
    }
}

// One block for each of kLanes tokens.
LEAPAHEAD_AVX512 void wide_words(uint64_t seed, uint64_t position, const uint32_t *tokens, uint32_t *words) {
    uint64_t a[kLanes], b[kLanes], c[kLanes], d[kLanes];
    for (int i = 0; i < kLanes; ++i) a[i] = tokens[i] / 8 + 1;
    wide_blocks(seed, position, a, b, c, d);
    for (int i = 0; i < kLanes; ++i) {
        const uint64_t low = tokens[i] & 2 ? b[i] : a[i], high = tokens[i] & 2 ? d[i] : c[i];
        words[i] = static_cast<uint32_t>((tokens[i] & 4 ? high : low) >> (32 * (tokens[i] & 1)));
    }
}

// The numbers of kLanes blocks, and which of these have a token that `contenders` wants, 1 or 0.
LEAPAHEAD_AVX512 void wide_contenders(const float *scores, float near, uint64_t seed, uint64_t position, int block,
                                      uint32_t unusual, uint64_t (*numbers)[kLanes], uint32_t *wanted) {
    uint64_t a[kLanes], b[kLanes], c[kLanes], d[kLanes];  // of this function alone: else they are no vectors
    for (int i = 0; i < kLanes; ++i) a[i] = static_cast<uint64_t>(block + i + 1);
    wide_blocks(seed, position, a, b, c, d);
    std::copy(a, a + kLanes, numbers[0]);
    std::copy(b, b + kLanes, numbers[1]);
    std::copy(c, c + kLanes, numbers[2]);
    std::copy(d, d + kLanes, numbers[3]);
    const uint64_t high = static_cast<uint64_t>(unusual) << 32;
    for (int i = 0; i < kLanes; ++i) {
        const uint64_t highest = std::max(std::max(a[i], b[i]), std::max(c[i], d[i]));
        const uint64_t lowest =
            std::max(std::max(a[i] & 0xFFFFFFFF, b[i] & 0xFFFFFFFF), std::max(c[i] & 0xFFFFFFFF, d[i] & 0xFFFFFFFF));
        wanted[i] = (highest >= high) | (lowest >= unusual);
    }
    for (int i = 0; i < kLanes; ++i) {
        uint32_t reached = 0;
        for (int token = 0; token < kBlock; ++token) reached |= scores[kBlock * i + token] >= near;
        wanted[i] |= reached;
    }
}

// exp of a number from -700 to 0; below -700 as of -700. The standard library's takes one number at a time.
inline double exponential(double x) {
    constexpr double kPerLog2 = 0x1.71547652b82fep+0, kLog2High = 0x1.62e42fee00000p-1,
                     kLog2Low = 0x1.a39ef35793c76p-33;
    constexpr double kRounding = 0x1.8p+52;  // a sum with it is rounded to an integer, which its lowest bits hold
    x = x > -700.0 ? x : -700.0;
    const double rounded = x * kPerLog2 + kRounding, power = rounded - kRounding;
    const double r = (x - power * kLog2High) - power * kLog2Low;  // at most log(2) / 2 in absolute value
    double found = 1.0 / 6227020800.0;                            // the Taylor series, from 1 / 13! on
    found = found * r + 1.0 / 479001600.0;
    found = found * r + 1.0 / 39916800.0;
    found = found * r + 1.0 / 3628800.0;
    found = found * r + 1.0 / 362880.0;
    found = found * r + 1.0 / 40320.0;
    found = found * r + 1.0 / 5040.0;
    found = found * r + 1.0 / 720.0;
    found = found * r + 1.0 / 120.0;
    found = found * r + 1.0 / 24.0;
    found = found * r + 1.0 / 6.0;
    found = ((found * r + 0.5) * r + 1.0) * r + 1.0;
    int64_t bits, exponent;
    std::memcpy(&bits, &found, sizeof bits);
    std::memcpy(&exponent, &rounded, sizeof exponent);
    bits += static_cast<int64_t>(static_cast<uint64_t>(exponent) << 52);
    std::memcpy(&found, &bits, sizeof found);
    return found;
}

template <typename T>
LEAPAHEAD_AVX512 void wide_largest(const T *numbers, int count, int k, int64_t *indices, T *values) {
    select_largest(numbers, count, k, indices, values);
}

LEAPAHEAD_AVX512 void wide_exponentials(const double *logits, int count, double *found) {
    for (int i = 0; i < count; ++i) found[i] = exponential(logits[i] - logits[0]);
}

#endif

}  // namespace

void noise_words(uint64_t seed, uint64_t position, const uint32_t *tokens, int count, uint32_t *words) {
    int done = 0;
#ifdef LEAPAHEAD_AVX512
    for (; kWide && done + kLanes <= count; done += kLanes) wide_words(seed, position, tokens + done, words + done);
#endif
    for (; done < count; ++done) words[done] = noise_word(seed, position, tokens[done]);
}

namespace {

// The greatest score; NaN if there is a NaN.
float greatest(const float *scores, int count) {
    constexpr int kParts = 16;  // each waits for its own comparisons only
    float most[kParts];
    uint32_t wrong[kParts] = {};
    std::fill_n(most, kParts, -std::numeric_limits<float>::infinity());
    int done = 0;
    for (; done + kParts <= count; done += kParts)
        for (int i = 0; i < kParts; ++i) {
            const float score = scores[done + i];
            wrong[i] |= score != score;
            most[i] = score > most[i] ? score : most[i];
        }
    for (; done < count; ++done) {
        wrong[0] |= scores[done] != scores[done];
        most[0] = scores[done] > most[0] ? scores[done] : most[0];
    }
    if (*std::max_element(wrong, wrong + kParts)) return std::numeric_limits<float>::quiet_NaN();
    return *std::max_element(most, most + kParts);
}

// The noise of a word, but for the last bits of the logarithms, which are those of other libraries elsewhere.
double noise(uint32_t word) { return -std::log(-std::log((word + 0.5) * 0x1p-32)); }

// More than the rounding of two sums in float32, with noise in float32.
double rounding(double sum) { return 1e-5 + 1e-6 * std::abs(sum); }

// The greatest noise of the words with some upper eight bits.
const std::array<double, 256> &greatest_noise() {
    static const std::array<double, 256> found = [] {
        std::array<double, 256> bounds;
        for (uint32_t i = 0; i < 256; ++i) bounds[i] = noise(i << 24 | 0xFFFFFF);
        return bounds;
    }();
    return found;
}

// Appends the tokens, rising, whose score is at least `near` or whose word at the position is at least `unusual`, and
// these words.
void contenders(const float *scores, int count, float near, uint64_t seed, uint64_t position, uint32_t unusual,
                std::vector<int64_t> &found, std::vector<uint32_t> &words) {
    const auto look = [&](int block, const std::array<uint64_t, 4> &numbers) {
        for (int token = kBlock * block; token < std::min(kBlock * (block + 1), count); ++token) {
            const uint64_t number = numbers[token / 2 % 4];
            const auto word = static_cast<uint32_t>(token % 2 ? number >> 32 : number);
            if (scores[token] < near && word < unusual) continue;
            found.push_back(token);
            words.push_back(word);
        }
    };
    int block = 0;
#ifdef LEAPAHEAD_AVX512
    uint64_t numbers[4][kLanes];
    uint32_t wanted[kLanes];
    for (; kWide && kBlock * (block + kLanes) <= count; block += kLanes) {
        wide_contenders(scores + kBlock * block, near, seed, position, block, unusual, numbers, wanted);
        for (int i = 0; i < kLanes; ++i)
            if (wanted[i]) look(block + i, {numbers[0][i], numbers[1][i], numbers[2][i], numbers[3][i]});
    }
#endif
    for (; kBlock * block < count; ++block) look(block, philox_block(seed, position, static_cast<uint64_t>(block) + 1));
}

}  // namespace

void leaders(const float *scores, int count, uint64_t seed, uint64_t position, float unusual, uint32_t word,
             std::vector<int64_t> &found) {
    const float best = greatest(scores, count);
    if (!std::isfinite(best)) return;
    const auto token = static_cast<uint32_t>(std::find(scores, scores + count, best) - scores);
    const double reached = best + noise(noise_word(seed, position, token));
    // A token with less noise than `unusual` needs a score near the best one to reach that sum. Where scores are so
    // large that their rounding counts, all are looked at.
    float near = static_cast<float>(reached - unusual - 0.01);
    if (!(std::abs(reached) < 1e4)) near = -std::numeric_limits<float>::infinity();
    std::vector<uint32_t> words;
    contenders(scores, count, near, seed, position, word, found, words);
    const auto &bounds = greatest_noise();  // most tokens are told apart without a logarithm
    std::vector<double> sums;
    size_t kept = 0;
    for (size_t i = 0; i < found.size(); ++i) {
        const double score = scores[found[i]];
        if (score + bounds[words[i] >> 24] < reached - rounding(reached)) continue;
        sums.push_back(score + noise(words[i]));
        found[kept++] = found[i];
    }
    const double most = *std::max_element(sums.begin(), sums.end()), least = most - rounding(most);
    size_t left = 0;
    for (size_t i = 0; i < kept; ++i)
        if (sums[i] >= least) found[left++] = found[i];
    found.resize(left);
}

namespace {

template <typename T>
void find_largest(const T *numbers, int count, int k, int64_t *indices, T *values) {
#ifdef LEAPAHEAD_AVX512
    if (kWide) return wide_largest(numbers, count, k, indices, values);
#endif
    select_largest(numbers, count, k, indices, values);
}

}  // namespace

void largest_at(const float *numbers, int count, int k, int64_t *indices, float *values) {
    find_largest(numbers, count, k, indices, values);
}

void largest_at(const double *numbers, int count, int k, int64_t *indices, double *values) {
    find_largest(numbers, count, k, indices, values);
}

double exponentials(const double *logits, int count, double *found) {
#ifdef LEAPAHEAD_AVX512
    if (kWide)
        wide_exponentials(logits, count, found);
    else
#endif
        for (int i = 0; i < count; ++i) found[i] = std::exp(logits[i] - logits[0]);
    double sums[4] = {};  // each waits for its own additions only
    for (int i = 0; i < count; ++i) sums[i % 4] += found[i];
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

}  // namespace leapahead
