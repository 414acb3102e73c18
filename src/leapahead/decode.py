"""The loop. Plain decoding is the tree with a root only; there is no second loop.

tree    = drafter.propose(context, budget)   what might come next
chosen  = target.step(trees)                 the target's own next token after EVERY node, in one forward
verdict = verify(tree, chosen)               walk from the root while a child equals the chosen token
session.commit(verdict)                      keep the path's cache entries, forget the rest
drafter.observe(step)                        pools, windows, automata learn from all of it
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from time import perf_counter

from leapahead.drafter import Context, Drafter, Proposal, Step
from leapahead.errors import DraftError
from leapahead.sampling import checked
from leapahead.stats import Stats
from leapahead.stop import Stopper
from leapahead.target import Choices, Session, Target
from leapahead.tree import Budget, TokenTree
from leapahead.verify import verify


@dataclass(eq=False)
class Generation:
    """One text in the making: a session of the target, its own drafter, its own stop, its own counters."""

    session: Session
    drafter: Drafter
    stopper: Stopper
    stats: Stats = field(default_factory=Stats)

    def __post_init__(self) -> None:
        self.context = Context(self.session.sampler)
        self.drafter.begin(self.context)

    @property
    def finished(self) -> bool:
        return self.stopper.finish_reason is not None

    def propose(self, target: Target) -> Proposal:
        """The drafter's tree; the budget ends where the text must end."""
        budget = Budget(nodes=target.max_nodes - 1, depth=self.stopper.room - 1, leaves=target.max_leaves)
        if min(budget.nodes, budget.depth) == 0:
            return Proposal(TokenTree.root(self.context.root))
        proposal = self.drafter.propose(self.context, budget)
        tree, name = proposal.tree, self.drafter.name
        if tree.tokens[0] != self.context.root:
            raise DraftError(f"drafter {name!r} drafted over token {tree.tokens[0]}, not {self.context.root}")
        if len(tree) > 1 and not 0 <= tree.tokens.min() <= tree.tokens.max() < target.vocab_size:
            raise DraftError(f"drafter {name!r} drafted a token outside the vocabulary of {target.vocab_size}")
        sizes = (len(tree) - 1, tree.depths.max(), len(tree.leaves)) if len(tree) > 1 else (0, 0, 0)
        if sizes[0] > budget.nodes or sizes[1] > budget.depth or sizes[2] > budget.leaves:
            raise DraftError(f"drafter {name!r} drafted beyond its budget of {budget}")
        return proposal

    def advance(self, proposal: Proposal, choices: Choices, clock: Clock) -> Step:
        """Verify, cut, commit, learn, count."""
        position = len(self.session.tokens) - 1
        verdict = self.stopper.cut(verify(proposal.tree, choices))
        checked(verdict.tokens, f"position {position + len(verdict.tokens)}")  # after the cut: EOS needs no successor
        clock.charge("verify", self.stats, choose=choices.seconds_since())
        self.session.commit(verdict)
        clock.charge("commit", self.stats)
        step = Step(proposal, choices, verdict, position)
        if not self.finished:
            self.drafter.observe(self.context, step)
        clock.charge("observe", self.stats, choose=choices.seconds_since())
        self._count(step)
        return step

    def _count(self, step: Step) -> None:
        stats, sources = self.stats, step.proposal.sources or (self.drafter.name,) * len(step.tree)
        stats.steps += 1
        stats.committed += len(step.tokens)
        stats.nodes += len(step.tree)
        stats.drafted += len(step.tree) - 1
        stats.accepted += step.verdict.accepted
        stats.drafted_by.update(sources[1:])
        for depth in range(1, step.verdict.accepted + 1):
            token = step.tokens[depth - 1]
            parent = step.verdict.path[depth - 1]
            node = step.tree.child(parent, token)
            assert node is not None  # an accepted token was drafted
            stats.accepted_by[sources[node]] += 1
            stats.accepted_at[depth] += 1


class Clock:
    """Charges the time since the last charge to a phase, in equal shares; `choose` seconds of it to that phase."""

    def __init__(self) -> None:
        self.last = perf_counter()

    def charge(self, phase: str, *stats: Stats, choose: float = 0.0) -> None:
        now = perf_counter()
        for each in stats:
            each.seconds[phase] += (now - self.last - choose) / len(stats)
            each.seconds["choose"] += choose / len(stats)
        self.last = now


def decode(target: Target, generations: list[Generation]) -> Generator[tuple[Generation, Step], None, None]:
    """Steps all `generations` together until each has finished.

    Args:
        target: the model that all the generations' sessions belong to.
        generations: a live list. Append to it between steps and a generation joins; one that finishes leaves.

    Yields:
        Every step of every generation, in order; `generation.finished` tells its last.
    """
    try:
        while generations:
            batch, clock = list(generations), Clock()
            proposals = []
            for generation in batch:
                proposals.append(generation.propose(target))
                clock.charge("draft", generation.stats)
            choices = target.step([s.session for s in batch], [p.tree for p in proposals])
            clock.charge("forward", *(s.stats for s in batch))
            steps = []  # all advance before the caller may open a session: its prompt may overwrite the logits
            for generation, proposal, chosen in zip(batch, proposals, choices, strict=True):
                steps.append((generation, generation.advance(proposal, chosen, clock)))
                if generation.finished:
                    generations.remove(generation)
                    generation.session.close()
                    generation.stats.drafter = generation.drafter.figures()
            yield from steps
    finally:
        for generation in generations:
            generation.session.close()
