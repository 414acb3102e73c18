// Acceptance estimates: src/leapahead/planner/acceptance.py, compiled.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "huge_pages.h"
#include "mixer.h"
#include "prefetch.h"

namespace leapahead {

// A key from coarse to fine: source, mode, then small integers. All of it in 64 bits, so that a prefix is a mask:
//
//     bits  0..3 number of elements   4..11 source   12..14 mode   15.. five bits for each further element
class Key {
  public:
    static constexpr int kMost = 11, kValues = 32;  // elements; each further one is below kValues

    Key() = default;
    static Key of_bits(uint64_t bits) {
        Key key;
        key.bits_ = bits;
        return key;
    }
    explicit Key(uint32_t source) : bits_(1 | static_cast<uint64_t>(source) << 4) {}
    Key(uint32_t source, uint32_t mode)
        : bits_(2 | static_cast<uint64_t>(source) << 4 | static_cast<uint64_t>(mode) << 12) {}

    void append(uint32_t value) {
        bits_ |= static_cast<uint64_t>(value) << (15 + 5 * (size() - 2));
        ++bits_;
    }
    int size() const { return static_cast<int>(bits_ & 15); }
    Key prefix(int size) const {
        const int kept = size == 1 ? 12 : 15 + 5 * (size - 2);
        return of_bits((bits_ & ((uint64_t{1} << kept) - 1) & ~uint64_t{15}) | static_cast<uint64_t>(size));
    }
    uint32_t source() const { return bits_ >> 4 & 255; }
    uint32_t mode() const { return bits_ >> 12 & 7; }
    uint32_t value(int index) const { return bits_ >> (15 + 5 * (index - 2)) & 31; }
    uint64_t bits() const { return bits_; }

  private:
    uint64_t bits_ = 0;
};

class AcceptanceTable {
  public:
    AcceptanceTable();

    // The number of a source's name, given when it is first asked for. Throws std::length_error beyond 256 names.
    uint32_t source(const std::string &name);
    const std::string &name(uint32_t source) const { return names_[source]; }

    void set_prior(Key key, double estimate) { at(key).prior = estimate; }
    // Tells the processor that the estimate of a key will be asked for.
    void prefetch(Key key) const { leapahead::prefetch(&places_[hashed(key.bits()) & (places_.size() - 1)]); }
    // Tells it that a trial of a key will be counted.
    void prefetch_prefixes(Key key) const {
        for (int size = 3; size <= key.size(); ++size) prefetch(key.prefix(size));
    }
    // The estimate of a key, at most 256 trials old, and its logit.
    double probability(Key key, double &logit);
    double estimate(Key key, double unknown = 0.25) const;
    void learn(Key key, bool hit);

    struct Row {
        Key key;
        double hits, trials, estimate;
    };
    // Of what was counted, keys of at most `longest` elements, in no particular order.
    std::vector<Row> rows(int longest) const;

    Mixer mixer;

  private:
    struct alignas(64) Entry {  // one line of the processor's cache
        uint64_t key;           // 0 where the place is free
        double prior;           // negative where there is none
        double hits, trials;
        double kept, logit;  // what `probability` gives until the next refreshment
        int64_t epoch;       // of these
    };

    static size_t hashed(uint64_t key) { return static_cast<size_t>((key * 0x9E3779B97F4A7C15) >> 20); }
    const Entry *find(uint64_t key) const;
    Entry &at(Key key);
    void grow();

    Table<Entry> places_;  // open addressing
    size_t used_ = 0;
    int64_t learned_ = 0, epoch_ = 0;
    std::vector<std::string> names_;
    std::unordered_map<std::string, uint32_t> sources_;
};

}  // namespace leapahead
