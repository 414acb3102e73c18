#include "acceptance.h"

#include <stdexcept>

namespace leapahead {

namespace {

constexpr double kPriorTrials = 6.0, kMostTrials = 300.0;
constexpr int64_t kRefresh = 256, kFirstRefresh = 8;

}  // namespace

AcceptanceTable::AcceptanceTable() : places_(1 << 13) {}

uint32_t AcceptanceTable::source(const std::string &name) {
    auto [place, added] = sources_.try_emplace(name, static_cast<uint32_t>(names_.size()));
    if (added) {
        if (names_.size() == 256) {
            sources_.erase(place);
            throw std::length_error("there are too many names of sources");
        }
        names_.push_back(name);
    }
    return place->second;
}

size_t AcceptanceTable::place(uint64_t key) const {
    const size_t mask = places_.size() - 1;
    const uint64_t hash = hashed(key);
    size_t at = hash & mask;
    for (; places_[at].entry != kNone; at = (at + 1) & mask)
        if (places_[at].tag == tag(hash) && entries_[places_[at].entry].key == key) break;
    return at;
}

int32_t AcceptanceTable::entry(Key key) {
    if (const int32_t known = places_[place(key.bits())].entry; known != kNone) return known;
    const int32_t prefix = key.size() > 1 ? entry(key.prefix(key.size() - 1)) : kNone;
    if (2 * (entries_.size() + 1) > places_.size()) {
        places_.assign(2 * places_.size(), Place());
        for (size_t i = 0; i < entries_.size(); ++i)
            places_[place(entries_[i].key)] = {static_cast<int32_t>(i), tag(hashed(entries_[i].key))};
    }
    const auto added = static_cast<int32_t>(entries_.size());
    places_[place(key.bits())] = {added, tag(hashed(key.bits()))};
    entries_.push_back({key.bits(), prefix});
    return added;
}

double AcceptanceTable::probability(int32_t entry, double &logit) {
    Entry &found = entries_[entry];
    if (found.epoch != epoch_) {
        found.kept = estimate_of(entry, kUnknown);
        found.logit = leapahead::logit(found.kept);
        found.epoch = epoch_;
    }
    logit = found.logit;
    return found.kept;
}

double AcceptanceTable::estimate(Key key, double unknown) const {
    int32_t found = kNone;  // of the longest prefix that there is
    for (int size = key.size(); size > 0 && found == kNone; --size) found = places_[place(key.prefix(size).bits())].entry;
    return estimate_of(found, unknown);
}

double AcceptanceTable::estimate_of(int32_t entry, double unknown) const {
    const Entry *counted[Key::kMost];  // from fine to coarse, up to the first prefix that has a prior
    int count = 0;
    double estimate = unknown;
    for (; entry != kNone; entry = entries_[entry].prefix) {
        const Entry &found = entries_[entry];
        if (found.trials > 0.0) counted[count++] = &found;
        if (found.prior < 0.0) continue;
        estimate = found.prior;
        break;
    }
    while (count-- > 0)
        estimate = (counted[count]->hits + kPriorTrials * estimate) / (counted[count]->trials + kPriorTrials);
    return estimate;
}

void AcceptanceTable::learn(int32_t entry, bool hit) {
    ++learned_;
    if (learned_ % (learned_ > kRefresh ? kRefresh : kFirstRefresh) == 0) ++epoch_;
    for (; entry != kNone; entry = entries_[entry].prefix) {
        Entry &counted = entries_[entry];
        counted.hits += hit;
        counted.trials += 1.0;
        if (counted.trials > kMostTrials) {
            counted.hits *= 0.5;
            counted.trials *= 0.5;
        }
    }
}

std::vector<AcceptanceTable::Row> AcceptanceTable::rows(int longest) const {
    std::vector<Row> found;
    for (const Entry &entry : entries_) {
        const Key key = Key::of_bits(entry.key);
        if (entry.trials > 0.0 && key.size() <= longest)
            found.push_back({key, entry.hits, entry.trials, estimate(key)});
    }
    return found;
}

}  // namespace leapahead
