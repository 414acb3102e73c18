#include "sizing.h"

#include <algorithm>
#include <limits>

namespace leapahead {

namespace {

constexpr int kAhead = 8, kMost = 256;

class Step {
  public:
    explicit Step(const Costs &costs) : costs_(costs) {
        for (const int replay : costs.replay) trees_.push_back({1 + replay});
        first_ = rows();
    }

    // Of all trees.
    int rows() const {
        if (!costs_.padded || costs_.branches) return filled();
        int most = 0;
        for (const Tree &tree : trees_) most = std::max(most, tree.rows);
        return count() * most;
    }
    // Without padding.
    int filled() const {
        int sum = 0;
        for (const Tree &tree : trees_) sum += tree.rows;
        return sum;
    }
    // A search has taken a node.
    void take(int index, const Search &search, double chance) {
        Tree &tree = trees_[index];
        const int replay = costs_.replay[index], longest = 1 + replay + search.deepest();
        tree.rows = costs_.branches ? search.leaves() * longest : tree.rows + 1;
        tree.expected += chance;
        tree.whole = search.deepest() > tree.deepest ? chance : tree.whole + chance;
        tree.deepest = search.deepest();
    }
    // Seconds of the step, where the trees have so many rows and drafted nodes.
    double operator()(int rows, int nodes) const {
        const bool padded = costs_.padded && !costs_.branches && (nodes > 0 || !costs_.replays);
        const int size = padded ? costs_.sequences * std::max(rows / count(), costs_.longest) : rows + costs_.others;
        const double outside =
            costs_.spent + (nodes > 0 ? costs_.resizing : 0.0) + (costs_.base + costs_.per_node * nodes);
        return forward(size) + outside + (nodes > 0 && costs_.replays ? later(size) : 0.0);
    }
    double plain() const { return (*this)(costs_.replays ? filled() : first_, 0); }
    // Whether some number of further nodes, all as likely as `chance`, would beat the best rate.
    bool may_win(double best, double total, double chance) const {
        const int now = rows();
        const double padding = now - filled();  // that nodes may fill at no cost
        const auto wins = [&](int size) {
            return total + padding * chance + (size - now) * chance > best * (*this)(size, size - first_);
        };
        if (wins(now) || wins(now + 1)) return true;
        return std::any_of(costs_.sizes.begin(), costs_.sizes.end(),
                           [&](int size) { return now + 1 < size && size <= kAhead + 2 * now && wins(size); });
    }

  private:
    struct Tree {
        int rows;               // replayed tokens included
        int deepest = 0;        // depth of its deepest nodes
        double expected = 0.0;  // the sum of P
        double whole = 1.0;     // the sum of P of its deepest nodes
    };

    int count() const { return static_cast<int>(trees_.size()); }
    double forward(int size) const {
        const size_t all = static_cast<size_t>(size);
        return all < costs_.seconds.size() ? costs_.seconds[all] : std::numeric_limits<double>::infinity();
    }
    // Expected seconds of the next forward for tokens of these trees that are read again.
    double later(int size) const {
        double sum = 0.0, most = 0.0;
        for (size_t index = 0; index < trees_.size(); ++index) {
            const Tree &tree = trees_[index];
            if (tree.deepest == 0) continue;
            const double again =
                1.0 + tree.expected - (tree.deepest + 1) * tree.whole + (1.0 - tree.whole) * costs_.replay[index];
            sum += again;
            most = std::max(most, again);
        }
        const int half = (size + 1) / 2;
        const double row = std::max(0.0, forward(size) - forward(half)) / (size - half);
        return (costs_.padded && !costs_.branches ? costs_.sequences * most : sum) * row;
    }

    const Costs &costs_;
    std::vector<Tree> trees_;
    int first_;
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
    Step step(costs);
    std::vector<int> taken;  // the search of each node
    double total = costs.sequences, best = total / step.plain();
    size_t kept = 0;
    Order order(searches);
    for (int index; taken.size() < kMost && (index = order.first()) >= 0;) {
        const double chance = searches[index]->next();
        if (!step.may_win(best, total, chance)) break;
        const bool was_taken = searches[index]->take();
        order.update(index);
        if (!was_taken) continue;
        taken.push_back(index);
        step.take(index, *searches[index], chance);
        total += chance;
        const double rate = total / step(step.rows(), static_cast<int>(taken.size()));
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
