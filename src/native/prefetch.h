// Reading ahead: a forward of the target has displaced what drafting needs from the processor's cache.
#pragma once

namespace leapahead {

inline void prefetch(const void *address) {
#if defined(__GNUC__)
    __builtin_prefetch(address);
#else
    static_cast<void>(address);
#endif
}

}  // namespace leapahead
