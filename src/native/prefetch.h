// Reading ahead: a forward of the target has displaced what drafting needs from the processor's cache.
#pragma once

#include <algorithm>
#include <cstddef>

namespace leapahead {

inline void prefetch(const void *address) {
#if defined(__GNUC__)
    __builtin_prefetch(address);
#else
    static_cast<void>(address);
#endif
}

// The same of an array.
template <typename T>
void prefetch_all(const T *begin, const T *end) {
    constexpr size_t kLine = 64 / sizeof(T);
    for (; begin < end; begin += std::min<size_t>(kLine, end - begin)) prefetch(begin);
}

}  // namespace leapahead
