// Loops over many numbers, with instructions for eight at once (AVX-512) where the processor has them.
#pragma once

#include <cstdint>
#include <vector>

namespace leapahead {

// The random words of tokens at a position; see philox.h.
void noise_words(uint64_t seed, uint64_t position, const uint32_t *tokens, int count, uint32_t *words);

// Appends the tokens, rising, whose score is at least `near` or whose random word at the position is at least
// `unusual`.
void contenders(const float *scores, int count, float near, uint64_t seed, uint64_t position, uint32_t unusual,
                std::vector<int64_t> &found);

// Writes the indices of the k greatest of `count` numbers, at least k, and the numbers, falling; of equal ones the first
// comes first. NaN counts as negative infinity.
void largest_at(const float *numbers, int count, int k, int64_t *indices, float *values);
void largest_at(const double *numbers, int count, int k, int64_t *indices, double *values);

// Writes exp(logit - first logit) of falling logits, to about one unit in the last place; returns the sum of them.
double exponentials(const double *logits, int count, double *found);

}  // namespace leapahead
