#include "acceptance.h"

#include <stdexcept>

namespace leapahead {

namespace {

constexpr double kPriorTrials = 6.0, kMostTrials = 300.0;
constexpr int64_t kRefresh = 256, kFirstRefresh = 8;

}  // namespace

AcceptanceTable::AcceptanceTable() : places_(1 << 12, Entry{0, -1.0, 0.0, 0.0, 0.0, 0.0, -1}) {}

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

const AcceptanceTable::Entry *AcceptanceTable::find(uint64_t key) const {
    const size_t mask = places_.size() - 1;
    for (size_t place = hashed(key) & mask;; place = (place + 1) & mask) {
        if (places_[place].key == key) return &places_[place];
        if (places_[place].key == 0) return nullptr;
    }
}

AcceptanceTable::Entry &AcceptanceTable::at(Key key) {
    if (const Entry *found = find(key.bits())) return const_cast<Entry &>(*found);
    if (4 * ++used_ > 3 * places_.size()) grow();
    const size_t mask = places_.size() - 1;
    size_t place = hashed(key.bits()) & mask;
    while (places_[place].key != 0) place = (place + 1) & mask;
    places_[place].key = key.bits();
    return places_[place];
}

void AcceptanceTable::grow() {
    Table<Entry> former(2 * places_.size(), Entry{0, -1.0, 0.0, 0.0, 0.0, 0.0, -1});
    former.swap(places_);
    const size_t mask = places_.size() - 1;
    for (const Entry &entry : former) {
        if (entry.key == 0) continue;
        size_t place = hashed(entry.key) & mask;
        while (places_[place].key != 0) place = (place + 1) & mask;
        places_[place] = entry;
    }
}

double AcceptanceTable::probability(Key key, double &logit) {
    Entry &entry = at(key);
    if (entry.epoch != epoch_) {
        entry.kept = estimate(key);
        entry.logit = leapahead::logit(entry.kept);
        entry.epoch = epoch_;
    }
    logit = entry.logit;
    return entry.kept;
}

double AcceptanceTable::estimate(Key key, double unknown) const {
    const Entry *counted[Key::kMost];  // from fine to coarse, up to the first prefix that has a prior
    int count = 0;
    double estimate = unknown;
    for (int size = key.size(); size > 0; --size) {
        const Entry *found = find(key.prefix(size).bits());
        if (found == nullptr) continue;
        if (found->trials > 0.0) counted[count++] = found;
        if (found->prior < 0.0) continue;
        estimate = found->prior;
        break;
    }
    while (count-- > 0)
        estimate = (counted[count]->hits + kPriorTrials * estimate) / (counted[count]->trials + kPriorTrials);
    return estimate;
}

void AcceptanceTable::learn(Key key, bool hit) {
    ++learned_;
    if (learned_ % (learned_ > kRefresh ? kRefresh : kFirstRefresh) == 0) ++epoch_;
    for (int size = 1; size <= key.size(); ++size) {
        Entry &entry = at(key.prefix(size));
        entry.hits += hit;
        entry.trials += 1.0;
        if (entry.trials > kMostTrials) {
            entry.hits *= 0.5;
            entry.trials *= 0.5;
        }
    }
}

std::vector<AcceptanceTable::Row> AcceptanceTable::rows(int longest) const {
    std::vector<Row> found;
    for (const Entry &entry : places_) {
        if (entry.key == 0 || entry.trials == 0.0) continue;
        const Key key = Key::of_bits(entry.key);
        if (key.size() <= longest) found.push_back({key, entry.hits, entry.trials, estimate(key)});
    }
    return found;
}

}  // namespace leapahead
