// Loops over many numbers, with instructions for eight at once (AVX-512) where the processor has them.
#pragma once

#include <cstdint>

namespace leapahead {

// The random words of tokens at a position; see philox.h.
void noise_words(uint64_t seed, uint64_t position, const uint32_t *tokens, int count, uint32_t *words);

// Writes exp(logit - first logit) of falling logits, to about one unit in the last place; returns the sum of them.
double exponentials(const double *logits, int count, double *found);

}  // namespace leapahead
