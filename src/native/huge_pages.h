// Memory of huge pages for the tables of drafters. A batch has more of them than the processor keeps translations of
// small pages for, and reads all over them in every step; each alone is smaller than a huge page, so they share some.
#pragma once

#include <cstddef>
#include <new>
#include <vector>

namespace leapahead {

namespace huge_pages {

// At least `size` bytes. Throws std::bad_alloc.
void *allocate(size_t size);
void release(void *memory, size_t size);

}  // namespace huge_pages

template <typename T>
struct HugePages {
    using value_type = T;

    HugePages() = default;
    template <typename Other>
    HugePages(const HugePages<Other> &) {}

    T *allocate(size_t count) { return static_cast<T *>(huge_pages::allocate(count * sizeof(T))); }
    // Elements that are made without a value are left as the memory is.
    template <typename U>
    void construct(U *place) {
        ::new (static_cast<void *>(place)) U;
    }
    void deallocate(T *memory, size_t count) { huge_pages::release(memory, count * sizeof(T)); }
    bool operator==(const HugePages &) const { return true; }
    bool operator!=(const HugePages &) const { return false; }
};

// A vector that may become large.
template <typename T>
using Table = std::vector<T, HugePages<T>>;

}  // namespace leapahead
