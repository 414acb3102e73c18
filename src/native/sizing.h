// The tree sizes that pay: src/leapahead/planner/sizing.py, compiled.
#pragma once

#include <vector>

#include "search.h"

namespace leapahead {

// What a step costs.
struct Costs {
    const std::vector<double> &seconds;  // of the forward, by its number of rows; larger forwards are not possible
    const std::vector<int> &sizes;       // numbers of rows that are looked at ahead
    const std::vector<int> &replay;      // tokens that are read again before the root, of each tree
    int sequences;                       // of the forward, whether they draft or not
    int others, longest;                 // rows of those that draft nothing; the most of one of them
    bool replays;                        // a draft that is not accepted whole is read again
    bool branches;                       // every path of a tree takes as many rows as the longest
    bool padded;                         // all sequences have as many rows as the longest
    double spent;                        // seconds outside the forward: so far,
    double resizing;                     // if there are drafted nodes,
    double base, per_node;               // always, and for each drafted node
};

// How many nodes of each tree to keep, the root counted. Nothing has been taken from the searches.
std::vector<int> best_sizes(const std::vector<Search *> &searches, const Costs &costs);

}  // namespace leapahead
