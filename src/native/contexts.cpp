#include "contexts.h"

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

bool Context::operator==(const Context &other) const {
    if (size != other.size) return false;
    for (int i = 0; i < size; ++i)
        if (tokens[i] != other.tokens[i]) return false;
    return true;
}

uint64_t Context::hash() const {
    uint64_t found = static_cast<uint64_t>(size);
    for (int i = 0; i < size; ++i) {
        found = (found ^ static_cast<uint32_t>(tokens[i])) * 0x9E3779B97F4A7C15;
        found ^= found >> 29;
    }
    return found;
}

size_t ContextTable::place(const Context &context, uint64_t hash) const {
    const size_t mask = places_.size() - 1;
    size_t at = hash & mask;
    for (; places_[at].index != kFree; at = (at + 1) & mask)
        if (places_[at].tag == tag(hash) && entries_[places_[at].index].context == context) break;
    return at;
}

const ContextTable::Entry *ContextTable::find(const Context &context) const {
    const int32_t index = places_[place(context, context.hash())].index;
    return index == kFree || !entries_[index].row ? nullptr : &entries_[index];
}

void ContextTable::put(const Context &context, Row row, int64_t number, bool move_to_end) {
    const uint64_t hash = context.hash();
    const size_t at = place(context, hash);
    if (places_[at].index != kFree) {
        Entry &entry = entries_[places_[at].index];
        if (entry.row && !move_to_end) {
            entry.row = std::move(row);
            entry.number = number;
            return;
        }
        used_ -= entry.row != nullptr;
        entry.row.reset();  // a gap, which the new entry's place no longer refers to
    }
    places_[at] = {static_cast<int32_t>(entries_.size()), tag(hash)};
    entries_.push_back({context, std::move(row), number});
    ++used_;
    if (2 * entries_.size() > places_.size()) rebuild();
}

void ContextTable::drop(size_t count) {
    for (; first_ < entries_.size() && count > 0; ++first_) {
        Entry &entry = entries_[first_];
        if (!entry.row) continue;
        entry.row.reset();
        --used_;
        --count;
    }
}

void ContextTable::rebuild() {
    std::vector<Entry> kept;
    kept.reserve(used_ + used_ / 2 + 16);
    for (Entry &entry : entries_)
        if (entry.row) kept.push_back(std::move(entry));
    entries_ = std::move(kept);
    first_ = 0;
    size_t size = 64;
    while (size < 4 * entries_.size()) size *= 2;
    places_.assign(size, Place());
    for (size_t index = 0; index < entries_.size(); ++index) {
        const uint64_t hash = entries_[index].context.hash();
        places_[place(entries_[index].context, hash)] = {static_cast<int32_t>(index), tag(hash)};
    }
}

}  // namespace leapahead
