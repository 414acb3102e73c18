// What recycling keeps for contexts: the top-k tokens after the last one to four tokens of a text.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "huge_pages.h"
#include "prefetch.h"

namespace leapahead {

struct Likely {
    int32_t token;
    float logp;
};

// The k likeliest tokens after a context, the likeliest first. Valid until the table that gave them is changed.
struct TopK {
    const Likely *first = nullptr;
    int count = 0;

    const Likely &operator[](int i) const { return first[i]; }
    const Likely *begin() const { return first; }
    const Likely *end() const { return first + count; }
};

// The last tokens of a text, the oldest first.
struct Context {
    static constexpr int kMost = 4;

    int32_t size = 0;
    int32_t tokens[kMost] = {};

    static Context of(const int32_t *tokens, int size);
    // The last `wanted` of them.
    Context last(int wanted) const { return of(tokens + size - wanted, wanted); }
    // With one more token, and at most `longest`.
    Context with(int32_t token, int longest) const;
};

// A context, and the hashes of its last one, two, .. tokens.
struct HashedContext {
    Context context;
    uint64_t hashes[Context::kMost] = {};

    explicit HashedContext(const Context &context);
};

// Rows of top-k tokens, of which several contexts refer to one. The counts of these references are kept apart from the
// rows and take little memory, so that a row that is not read is not touched.
class RowPool {
  public:
    RowPool() = default;
    RowPool(RowPool &&) = default;
    RowPool &operator=(RowPool &&) = default;

    // A new row for `count` tokens, to which the caller has a reference.
    int32_t add(int count);
    Likely *at(int32_t row) { return blocks_[row / kBlock].data() + static_cast<size_t>(row % kBlock) * width_; }
    TopK top_k(int32_t row) const {
        return {blocks_[row / kBlock].data() + static_cast<size_t>(row % kBlock) * width_, counts_[row]};
    }
    void hold(int32_t row) { ++references_[row]; }
    void release(int32_t row) {
        if (--references_[row] == 0) free_.push_back(row);
    }

  private:
    static constexpr int kBlock = 64;  // rows whose memory is reserved together

    void widen(int width);

    size_t width_ = 0;
    std::vector<Table<Likely>> blocks_;
    std::vector<uint8_t> references_;
    std::vector<int32_t> counts_;
    std::vector<int32_t> free_;  // rows without references
};

// Context -> row, with a number. In the order of entry; an entry that is written again keeps its place in the order,
// unless it is moved to the end. Open addressing over a list of entries, which may have gaps.
class ContextTable {
  public:
    struct alignas(32) Entry {  // two fill a line of the processor's cache
        Context context;
        int32_t row;  // kGap in a gap
        int32_t number;
    };

    ContextTable() : places_(64) {}

    // Of the last `size` tokens; null for none.
    const Entry *find(const HashedContext &context, int size) const;
    TopK top_k(const Entry &entry) const { return rows.top_k(entry.row); }
    void put(const HashedContext &context, int size, int32_t row, int32_t number, bool move_to_end);
    // Tells the processor that the last `size` tokens will be asked for or written; first this,
    void prefetch(const HashedContext &context, int size) const {
        leapahead::prefetch(&places_[context.hashes[size - 1] & (places_.size() - 1)]);
    }
    // and then, once that has been read, this.
    void prefetch_entry(const HashedContext &context, int size) const;
    // Drops the entries that come first in the order.
    void drop(size_t count);
    size_t size() const { return used_; }

    template <typename Visit>
    void each(Visit visit) const {
        for (const Entry &entry : entries_)
            if (entry.row != kGap) visit(entry.context, top_k(entry));
    }

    RowPool rows;

  private:
    static constexpr int32_t kFree = -1, kGap = -1;

    struct Place {
        int32_t index = kFree;  // into entries_; gaps stay until `rebuild`
        uint32_t tag = 0;       // part of the hash, so that most other contexts are told apart without their entry
    };
    static uint32_t tag(uint64_t hash) { return static_cast<uint32_t>(hash >> 32); }

    // Of the entry, or the free one where it would be.
    size_t place(const int32_t *tokens, int size, uint64_t hash) const;
    void rebuild();

    Table<Entry> entries_;  // in order
    Table<Place> places_;
    size_t first_ = 0;  // no entry before this one is left
    size_t used_ = 0;
};

}  // namespace leapahead
