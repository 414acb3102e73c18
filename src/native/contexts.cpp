#include "contexts.h"

#include <algorithm>
#include <utility>

namespace leapahead {

Context Context::of(const int32_t *tokens, int size) {
    Context found;
    found.size = size;
    for (int i = 0; i < size; ++i) found.tokens[i] = tokens[i];
    return found;
}

Context Context::with(int32_t token, int longest) const {
    Context found;
    const int kept = size < longest ? size : longest - 1;
    for (int i = 0; i < kept; ++i) found.tokens[i] = tokens[size - kept + i];
    found.tokens[kept] = token;
    found.size = kept + 1;
    return found;
}

HashedContext::HashedContext(const Context &of) : context(of) {
    uint64_t hash = 0x9E3779B97F4A7C15;
    for (int length = 1; length <= of.size; ++length) {
        hash = (hash ^ static_cast<uint32_t>(of.tokens[of.size - length])) * 0x9E3779B97F4A7C15;
        hash ^= hash >> 29;
        hashes[length - 1] = hash;
    }
}

int32_t RowPool::add(int count) {
    if (static_cast<size_t>(count) > width_) widen(count);
    if (free_.empty()) {
        const int32_t first = static_cast<int32_t>(references_.size());
        blocks_.emplace_back(kBlock * width_);
        references_.resize(references_.size() + kBlock);
        counts_.resize(references_.size());
        for (int32_t row = first + kBlock; row-- > first;) free_.push_back(row);
    }
    const int32_t row = free_.back();
    free_.pop_back();
    references_[row] = 1;
    counts_[row] = count;
    return row;
}

void RowPool::widen(int width) {
    for (auto &block : blocks_) {
        Table<Likely> wider(static_cast<size_t>(kBlock) * width);
        for (int row = 0; row < kBlock; ++row)
            std::copy_n(block.data() + row * width_, width_, wider.data() + static_cast<size_t>(row) * width);
        block = std::move(wider);
    }
    width_ = width;
}

size_t ContextTable::place(const int32_t *tokens, int size, uint64_t hash) const {
    const size_t mask = places_.size() - 1;
    size_t at = hash & mask;
    for (; places_[at].index != kFree; at = (at + 1) & mask) {
        if (places_[at].tag != tag(hash)) continue;
        const Context &context = entries_[places_[at].index].context;
        if (context.size == size && std::equal(tokens, tokens + size, context.tokens)) break;
    }
    return at;
}

const ContextTable::Entry *ContextTable::find(const HashedContext &context, int size) const {
    const int32_t *tokens = context.context.tokens + context.context.size - size;
    const int32_t index = places_[place(tokens, size, context.hashes[size - 1])].index;
    return index == kFree || entries_[index].row == kGap ? nullptr : &entries_[index];
}

void ContextTable::prefetch_entry(const HashedContext &context, int size) const {
    const uint64_t hash = context.hashes[size - 1];
    const Place &place = places_[hash & (places_.size() - 1)];
    if (place.tag == tag(hash) && place.index != kFree) leapahead::prefetch(&entries_[place.index]);
}

void ContextTable::put(const HashedContext &context, int size, int32_t row, int32_t number, bool move_to_end) {
    const uint64_t hash = context.hashes[size - 1];
    const int32_t *tokens = context.context.tokens + context.context.size - size;
    const size_t at = place(tokens, size, hash);
    rows.hold(row);
    if (places_[at].index != kFree) {
        Entry &entry = entries_[places_[at].index];
        if (entry.row != kGap) rows.release(entry.row);
        if (entry.row != kGap && !move_to_end) {
            entry.row = row;
            entry.number = number;
            return;
        }
        used_ -= entry.row != kGap;
        entry.row = kGap;  // which the new entry's place no longer refers to
    }
    places_[at] = {static_cast<int32_t>(entries_.size()), tag(hash)};
    entries_.push_back({Context::of(tokens, size), row, number});
    ++used_;
    if (2 * entries_.size() > places_.size()) rebuild();
}

void ContextTable::drop(size_t count) {
    for (; first_ < entries_.size() && count > 0; ++first_) {
        Entry &entry = entries_[first_];
        if (entry.row == kGap) continue;
        rows.release(entry.row);
        entry.row = kGap;
        --used_;
        --count;
    }
}

void ContextTable::rebuild() {
    entries_.erase(
        std::remove_if(entries_.begin(), entries_.end(), [](const Entry &entry) { return entry.row == kGap; }),
        entries_.end());
    first_ = 0;
    size_t size = 64;
    while (size < 4 * entries_.size()) size *= 2;
    places_.assign(size, Place());
    for (size_t index = 0; index < entries_.size(); ++index) {
        const Context &context = entries_[index].context;
        const uint64_t hash = HashedContext(context).hashes[context.size - 1];
        places_[place(context.tokens, context.size, hash)] = {static_cast<int32_t>(index), tag(hash)};
    }
}

}  // namespace leapahead
