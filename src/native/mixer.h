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
    static constexpr int kPlaces = 4;
    static constexpr const char *kLeading = "prediction";  // the source with which all have parameters of their own

    struct Weights {
        double proposing, bias, silent;  // w, b and u
    };
    using Parameters = std::array<Weights, kMostProposing>;  // by the number of sources that propose a token, less one
    struct Row {
        Mode mode;
        int place;
        uint32_t source;
        Parameters parameters;
    };

    // Where candidates are: 0 at the root, 1 deeper, and 2 more where the leading source has some.
    static int place(int depth, bool leading) { return (depth > 0) + 2 * leading; }
    Parameters &parameters(Mode mode, int place, uint32_t source);
    void set(const Row &row) { parameters(row.mode, row.place, row.source) = row.parameters; }
    std::vector<Row> rows() const;

  private:
    struct Entry {
        bool known = false;
        Parameters parameters;
    };

    std::vector<Entry> entries_[3][kPlaces];  // [mode][place][source]
};

}  // namespace leapahead
