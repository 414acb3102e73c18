#include "mixer.h"

namespace leapahead {

Mixer::Parameters &Mixer::parameters(Mode mode, int below, uint32_t source) {
    std::vector<Place> &places = places_[static_cast<uint32_t>(mode)][below];
    if (source >= places.size()) places.resize(source + 1);
    Place &place = places[source];
    if (!place.known) {
        place.known = true;
        for (int count = 1; count <= kMostProposing; ++count)
            place.parameters[count - 1] = {1.0 / std::sqrt(static_cast<double>(count)), 0.0, 0.0};
    }
    return place.parameters;
}

std::vector<Mixer::Row> Mixer::rows() const {
    std::vector<Row> found;
    for (uint32_t mode = 0; mode < 3; ++mode)
        for (int below = 0; below < 2; ++below)
            for (uint32_t source = 0; source < places_[mode][below].size(); ++source)
                if (const Place &place = places_[mode][below][source]; place.known)
                    found.push_back({static_cast<Mode>(mode), below, source, place.parameters});
    return found;
}

}  // namespace leapahead
