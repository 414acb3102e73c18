#include "huge_pages.h"

#if defined(__linux__)
#include <sys/mman.h>

#include <cstdint>
#include <mutex>
#include <set>
#endif

namespace leapahead {

namespace huge_pages {

namespace {

constexpr size_t kAlignment = 64;  // of all memory: a line of the processor's cache

void *small(size_t size) { return ::operator new(size, std::align_val_t(kAlignment)); }

void release_small(void *memory) { ::operator delete(memory, std::align_val_t(kAlignment)); }

}  // namespace

#if defined(__linux__)

namespace {

constexpr size_t kLeast = size_t{1} << 12, kPage = size_t{1} << 21;  // bytes
constexpr int kOrders = 9;                                           // blocks have kLeast << order bytes

// Whole huge pages from the system.
void *map(size_t size) {
    void *found = mmap(nullptr, size + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (found == MAP_FAILED) throw std::bad_alloc();
    char *const first = static_cast<char *>(found);
    const size_t before = (kPage - reinterpret_cast<uintptr_t>(first) % kPage) % kPage;
    if (before > 0) munmap(first, before);
    munmap(first + before + size, kPage - before);
    madvise(first + before, size, MADV_HUGEPAGE);  // where the system refuses, they stay small
    return first + before;
}

size_t whole_pages(size_t size) { return (size + kPage - 1) / kPage * kPage; }

// Halves of huge pages, quarters and so on. Two free halves become one block again.
class Blocks {
  public:
    void *allocate(int order) {
        const std::lock_guard<std::mutex> guard(lock_);
        int found = order;
        while (found < kOrders && free_[found].empty()) ++found;
        char *block;
        if (found == kOrders) {
            block = static_cast<char *>(map(kPage));
            found = kOrders - 1;
            free_[found].insert(block + kPage / 2);
        } else {
            block = *free_[found].begin();
            free_[found].erase(free_[found].begin());
        }
        while (found > order) {
            --found;
            free_[found].insert(block + (kLeast << found));
        }
        return block;
    }
    void release(void *memory, int order) {
        const std::lock_guard<std::mutex> guard(lock_);
        auto block = reinterpret_cast<uintptr_t>(memory);
        for (; order < kOrders; ++order) {
            const uintptr_t other = block ^ (kLeast << order);
            const auto place = free_[order].find(reinterpret_cast<char *>(other));
            if (place == free_[order].end()) {
                free_[order].insert(reinterpret_cast<char *>(block));
                return;
            }
            free_[order].erase(place);
            block &= ~(kLeast << order);
        }
        munmap(reinterpret_cast<void *>(block), kPage);
    }

  private:
    std::mutex lock_;
    std::set<char *> free_[kOrders];  // lowest addresses first, so that few pages are in use
};
static_assert(kLeast << kOrders == kPage, "the largest block must be half of a page");

// Never destroyed: objects that Python does not delete before the process ends refer to it.
Blocks &blocks() {
    static Blocks &found = *new Blocks;
    return found;
}

int order_of(size_t size) {
    int order = 0;
    while (kLeast << order < size) ++order;
    return order;
}

}  // namespace

void *allocate(size_t size) {
    if (size < kLeast) return small(size);
    if (size > kPage / 2) return map(whole_pages(size));
    return blocks().allocate(order_of(size));
}

void release(void *memory, size_t size) {
    if (size < kLeast)
        release_small(memory);
    else if (size > kPage / 2)
        munmap(memory, whole_pages(size));
    else
        blocks().release(memory, order_of(size));
}

#else

void *allocate(size_t size) { return small(size); }

void release(void *memory, size_t) { release_small(memory); }

#endif

}  // namespace huge_pages

}  // namespace leapahead
