// What recycling keeps for contexts: the top-k tokens after the last one to four tokens of a text.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "prefetch.h"

namespace leapahead {

// The k likeliest tokens after a context, the likeliest first.
struct Likely {
    int32_t token;
    float logp;
};
using TopK = std::vector<Likely>;
using Row = std::shared_ptr<const TopK>;

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
    bool operator==(const Context &other) const;
    uint64_t hash() const;
};

// Context -> row, with a number. In the order of entry; an entry that is written again keeps its place in the order,
// unless it is moved to the end. Open addressing over a list of entries, which may have gaps.
class ContextTable {
  public:
    struct Entry {
        Context context;
        Row row;  // null in a gap
        int64_t number;
    };

    ContextTable() : places_(64) {}

    const Entry *find(const Context &context) const;
    // Tells the processor that a context will be asked for.
    void prefetch(const Context &context) const {
        leapahead::prefetch(&places_[context.hash() & (places_.size() - 1)]);
    }
    void put(const Context &context, Row row, int64_t number, bool move_to_end);
    // Drops the entries that come first in the order.
    void drop(size_t count);
    size_t size() const { return used_; }

    template <typename Visit>
    void each(Visit visit) const {
        for (const Entry &entry : entries_)
            if (entry.row) visit(entry);
    }

  private:
    static constexpr int32_t kFree = -1;

    struct Place {
        int32_t index = kFree;  // into entries_; gaps stay until `rebuild`
        uint32_t tag = 0;       // part of the hash, so that most other contexts are told apart without their entry
    };
    static uint32_t tag(uint64_t hash) { return static_cast<uint32_t>(hash >> 32); }

    size_t place(const Context &context, uint64_t hash) const;  // of the entry, or the free one where it would be
    void rebuild();

    std::vector<Entry> entries_;  // in order
    std::vector<Place> places_;
    size_t first_ = 0;  // no entry before this one is left
    size_t used_ = 0;
};

}  // namespace leapahead
