#include "mixer.h"

namespace leapahead {

Mixer::Parameters &Mixer::parameters(Mode mode, int place, uint32_t source) {
    std::vector<Entry> &entries = entries_[static_cast<uint32_t>(mode)][place];
    if (source >= entries.size()) entries.resize(source + 1);
    Entry &entry = entries[source];
    if (!entry.known) {
        entry.known = true;
        for (int count = 1; count <= kMostProposing; ++count)
            entry.parameters[count - 1] = {1.0 / std::sqrt(static_cast<double>(count)), 0.0, 0.0};
    }
    return entry.parameters;
}

std::vector<Mixer::Row> Mixer::rows() const {
    std::vector<Row> found;
    for (uint32_t mode = 0; mode < 3; ++mode)
        for (int place = 0; place < kPlaces; ++place)
            for (uint32_t source = 0; source < entries_[mode][place].size(); ++source)
                if (const Entry &entry = entries_[mode][place][source]; entry.known)
                    found.push_back({static_cast<Mode>(mode), place, source, entry.parameters});
    return found;
}

}  // namespace leapahead
