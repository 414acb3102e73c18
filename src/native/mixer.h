// The mixer: src/leapahead/planner/mixer.py, compiled.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <vector>

namespace leapahead {

inline double logit(double p) {
    constexpr double kLeast = 0.001;
    p = p > kLeast ? p : kLeast;
    p = p < 1.0 - kLeast ? p : 1.0 - kLeast;
    return std::log(p / (1.0 - p));
}

enum class Mode : uint32_t { greedy, sampled, unaware };

class Mixer {
  public:
    static constexpr int kMostProposing = 4;

    struct Weights {
        double proposing, bias, silent;  // w, b and u
    };
    using Parameters = std::array<Weights, kMostProposing>;  // by the number of sources that propose a token, less one
    struct Row {
        Mode mode;
        int below;
        uint32_t source;
        Parameters parameters;
    };

    // Of a source, at the root (below = 0) or deeper (1).
    Parameters &parameters(Mode mode, int below, uint32_t source);
    void set(const Row &row) { parameters(row.mode, row.below, row.source) = row.parameters; }
    std::vector<Row> rows() const;

  private:
    struct Place {
        bool known = false;
        Parameters parameters;
    };

    std::vector<Place> places_[3][2];  // [mode][below][source]
};

}  // namespace leapahead
