// Loops over many numbers, with instructions for eight at once (AVX-512) where the processor has them.
#pragma once

#include <cstdint>
#include <vector>

namespace leapahead {

// The random words of tokens at a position; see philox.h.
void noise_words(uint64_t seed, uint64_t position, const uint32_t *tokens, int count, uint32_t *words);

// The tokens, rising, of which one has the greatest sum of score and noise: usually it alone. None where the greatest
// score is NaN or infinite. `unusual` is a noise that few tokens exceed, and those with lower words than `word` do not.
void leaders(const float *scores, int count, uint64_t seed, uint64_t position, float unusual, uint32_t word,
             std::vector<int64_t> &found);

// Writes the indices of the k greatest of `count` numbers, at least k, and the numbers, falling; of equal ones the first
// comes first. NaN counts as negative infinity.
void largest_at(const float *numbers, int count, int k, int64_t *indices, float *values);
void largest_at(const double *numbers, int count, int k, int64_t *indices, double *values);

// Writes exp(logit - first logit) of falling logits, to about one unit in the last place; returns the sum of them.
double exponentials(const double *logits, int count, double *found);

}  // namespace leapahead
