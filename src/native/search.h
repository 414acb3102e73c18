// Best-first search for a token tree: src/leapahead/planner/tree_search.py, compiled.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "acceptance.h"
#include "source.h"

namespace leapahead {

struct Limits {
    int64_t nodes, depth, leaves;  // of the draft; the root is not counted
};

// Which of some tokens may come next after a path below the root, for a text of a given form.
using Filter = std::function<std::vector<bool>(const std::vector<int32_t> &path, const std::vector<int32_t> &tokens)>;

// A request's factor on the acceptance estimates.
class Correction {
  public:
    explicit Correction(double start) : prior_(kWeight * start), hits_(prior_) {}

    double factor() const { return hits_ / expected_; }
    void learn(double expected, bool hit) {
        hits_ = kDecay * (hits_ - prior_) + hit + prior_;
        expected_ = kDecay * (expected_ - kWeight) + expected + kWeight;
    }

  private:
    static constexpr double kWeight = 6.0, kDecay = 0.98;

    double prior_, hits_, expected_ = kWeight;
};

class Search {
  public:
    // Sources in the order in which a candidate of several names them.
    Search(std::vector<std::shared_ptr<Source>> sources, std::shared_ptr<AcceptanceTable> table, Mode mode,
           uint64_t seed, double temperature, Correction correction, Filter filter);
    // How many of the last tokens of a text the sources are to read.
    size_t unread(size_t length) const;
    // Makes it the search for the next tree.
    void begin(const Text &text, Limits limits);
    // How many of the likeliest tokens after the nodes of a draft `observe` needs.
    int wanted(const Outcome &outcome) const;
    // The sources learn from a draft; the memory that `learn` will read is asked for.
    void observe(const Outcome &outcome);

    // Of the tree: its leaves, and the greatest depth.
    int leaves() const { return static_cast<int>(leaves_); }
    int deepest() const { return deepest_; }
    int size() const { return static_cast<int>(nodes_.size()); }
    // An upper bound of P of all nodes that are not taken yet.
    double bound() const { return heap_.empty() ? 0.0 : -heap_.front().chance; }
    // P of the likeliest node that is not taken yet; 0 if there is none.
    double next();
    // The likeliest token after the root; none where no source has any, or none was asked.
    std::optional<int32_t> likeliest() const;
    // Adds the node that `next` has found; false, and it is dropped, if the limits forbid it.
    bool take();
    int take_all(int nodes);
    // Updates the estimates with the outcome along the committed path: the nodes, and the token after each.
    void learn(const std::vector<int> &path, const std::vector<int32_t> &tokens);

    struct Node {
        int32_t token;
        int parent, depth, source;  // source: index, or -1 for the root
        double expected;
        bool inner;
        int first_guess, end_guess;  // of its candidates, once they were asked for
        int first_asked, end_asked;  // sources
    };
    const std::vector<Node> &nodes() const { return nodes_; }
    int num_sources() const { return static_cast<int>(sources_.size()); }
    const Source &source(int index) const { return *sources_[index]; }
    int state(int node, int source) const { return states_[static_cast<size_t>(node) * sources_.size() + source]; }
    // The sum of p over the candidates below a node, at most 1.
    double total(int node) const;
    const Limits &limits() const { return limits_; }

  private:
    struct Opinion {  // of one source on one token
        Key key;
        double p, logit;
        int asked;  // index of the source among those that have candidates at the node
    };
    struct Guess {  // a token that may follow a node
        int32_t token;
        double p;
        int source;  // of the greatest estimate
        int first_opinion, end_opinion;
    };
    struct Entry {
        double chance;           // -P
        int order, node, guess;  // guess: -1 where the node's candidates were not asked for yet
        int next;                // in entries_: the candidate that is taken after it; -1 for none
    };
    struct Later {  // the entry that is taken first is at the front of a heap
        bool operator()(const Entry &a, const Entry &b) const {
            return a.chance != b.chance ? a.chance > b.chance : a.order > b.order;
        }
    };

    void push(const Entry &entry);
    Entry pop();
    // Asks all sources for candidates below a node whose P is `chance`.
    void expand(int node, double chance);
    // Drops those of `candidates_` that may not come next, and of the others all but the first `limit`.
    void filter(int limit);
    void make_exclusive();  // the chances, which may add up to more than 1; see `exclusive` in tree_search.py
    // Asks one source; false where it has no candidates.
    bool ask(int source, int state, int limit, const Scoring &score);
    // Adds those of `candidates_` that have the greatest scores.
    void rank(int source, int limit, const Scoring &score);
    void add(int32_t token, Key key);
    // The guess on number `place` of `tokens_`, from the opinions of all sources that propose it.
    Guess joined(int place);
    // Which of the mixer's parameters serve a node of this depth, at which these of `asked_` have candidates.
    int mixer_place(int depth, int first_asked, int end_asked) const;
    // The index of the mixer's parameters for so many sources that propose its token.
    int proposing(const Guess &guess) const;
    void learn(const Node &node, const Guess &guess, bool hit);

    std::vector<std::shared_ptr<Source>> sources_;
    std::vector<uint32_t> ids_;  // of the sources, in the table
    int leading_ = -1;           // index of the mixer's leading source
    std::shared_ptr<AcceptanceTable> table_;
    Mode mode_;
    Scoring scoring_;  // of the tokens after the root
    Correction correction_;
    Filter filter_;
    Limits limits_{};

    std::vector<Node> nodes_;
    std::vector<int> states_;     // [nodes, sources]
    std::vector<Entry> heap_;     // of the candidates below a node only the first that is not taken
    std::vector<Entry> entries_;  // of all candidates, in the order in which those below a node are taken
    std::vector<Guess> guesses_;
    std::vector<Opinion> opinions_;
    int order_ = 0;
    int64_t leaves_ = 1;
    int deepest_ = 0;
    std::vector<int> asked_;  // of all nodes one after the other: sources that have candidates there
    // Of one call of `expand`; members so that their memory is kept.
    struct Proposed {
        int first, last;  // of a token's opinions in found_
    };
    struct Found {
        Opinion opinion;
        int next;  // of the same token, or -1
    };
    std::vector<Candidate> candidates_;
    std::vector<int32_t> path_;  // of the node, where there is a filter
    std::vector<int> order_of_;
    std::vector<int32_t> tokens_;
    std::vector<Proposed> proposed_;  // of each of tokens_
    std::vector<Found> found_;
    std::vector<double> chances_, odds_;  // of the guesses
    std::vector<Mixer::Parameters *> parameters_;
    int num_asked_ = 0;
};

}  // namespace leapahead
