#include "sizing.h"

#include <algorithm>
#include <limits>

namespace leapahead {

namespace {

constexpr int kAhead = 8, kMost = 256;

class Step {
  public:
    Step(const Costs &costs, int searches) : costs_(costs), searches_(searches) {}

    // Of the step, where the trees have so many rows and as many drafted nodes as `nodes`.
    double operator()(int rows, int nodes) const {
        const int size = costs_.padded ? costs_.sequences * (rows / searches_) : rows + costs_.sequences - searches_;
        const size_t all = static_cast<size_t>(size);
        const double forward =
            all < costs_.seconds.size() ? costs_.seconds[all] : std::numeric_limits<double>::infinity();
        return forward + (costs_.spent + (nodes > 0 ? costs_.resizing : 0.0) + (costs_.base + costs_.per_node * nodes));
    }
    // Whether some number of further nodes, all as likely as `chance`, would beat the best rate.
    bool may_win(double best, double total, double chance, int rows) const {
        const auto wins = [&](int size) {
            return total + (size - rows) * chance > best * (*this)(size, size - searches_);
        };
        if (wins(rows) || wins(rows + 1)) return true;
        return std::any_of(costs_.sizes.begin(), costs_.sizes.end(),
                           [&](int size) { return rows + 1 < size && size <= kAhead + 2 * rows && wins(size); });
    }

  private:
    const Costs &costs_;
    int searches_;
};

// Searches by P of their likeliest node. A search is asked for it only when its bound is the greatest.
class Order {
  public:
    explicit Order(const std::vector<Search *> &searches) : searches_(searches) {
        for (const Search *search : searches) bounds_.push_back(search->bound());
    }

    // The search with the likeliest node; -1 if no search has any.
    int first() {
        while (!bounds_.empty()) {
            const auto place = std::max_element(bounds_.begin(), bounds_.end());  // the first of equals
            const int index = static_cast<int>(place - bounds_.begin());
            if (*place < 0.0) return -1;
            const double chance = searches_[index]->next();
            if (chance <= 0.0)
                *place = -1.0;
            else if (*place > chance)  // the bound was not tight, so another search may have a likelier node
                *place = chance;
            else
                return index;
        }
        return -1;
    }
    void update(int index) { bounds_[index] = searches_[index]->bound(); }

  private:
    const std::vector<Search *> &searches_;
    std::vector<double> bounds_;  // negative where a search has no more nodes
};

}  // namespace

std::vector<int> best_sizes(const std::vector<Search *> &searches, const Costs &costs) {
    const int roots = static_cast<int>(searches.size());
    const Step seconds(costs, roots);
    std::vector<int> taken, lengths(searches.size(), 1);  // taken: the search of each node
    double total = costs.sequences, best = total / seconds(roots, 0);
    size_t kept = 0;
    Order order(searches);
    const auto rows_of = [&] {
        return costs.padded ? roots * *std::max_element(lengths.begin(), lengths.end())
                            : roots + static_cast<int>(taken.size());
    };
    for (int index; taken.size() < kMost && (index = order.first()) >= 0;) {
        const double chance = searches[index]->next();
        const int rows = rows_of(), nodes = static_cast<int>(taken.size());
        const int unused = rows - roots - nodes;  // padding that nodes may fill at no cost
        if (!seconds.may_win(best, total + unused * chance, chance, rows)) break;
        const bool was_taken = searches[index]->take();
        order.update(index);
        if (!was_taken) continue;
        taken.push_back(index);
        ++lengths[index];
        total += chance;
        const double rate = total / seconds(rows_of(), nodes + 1);
        if (rate > best) {
            best = rate;
            kept = taken.size();
        }
    }
    std::vector<int> found(searches.size(), 1);
    for (size_t i = 0; i < kept; ++i) ++found[taken[i]];
    return found;
}

}  // namespace leapahead
