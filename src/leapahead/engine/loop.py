"""The loop. Plain decoding is the tree with a root only; there is no second loop.

tree    = drafter.propose(context, budget)   what might come next
chosen  = target.step(trees)                 the target's own next token after EVERY node, in one forward
verdict = verify(tree, chosen)               walk from the root while a child equals the chosen token
session.commit(verdict)                      keep the path's cache entries, forget the rest
drafter.observe(step)                        pools, windows, automata learn from all of it
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING

from leapahead.core.errors import DraftError
from leapahead.core.sampling import SamplingParams, checked
from leapahead.core.stats import Stats
from leapahead.core.stop import StopParams, Stopper
from leapahead.core.tree import Budget, TokenTree
from leapahead.core.verify import verify
from leapahead.drafters.base import Ask, Context, Drafter, Forward, Proposal, Step
from leapahead.drafters.cache import DrafterCache
from leapahead.models.base import Choices, Session, Target

if TYPE_CHECKING:
    from typing_extensions import Self


SHORT = 16  # new tokens, for which the prompt's logits would cost more than they can bring


@dataclass(eq=False)
class Generation:
    """One text in the making: a session of the target, its own drafter, its own stop, its own counters.

    Attributes:
        drafter_cache: what drafters keep from one text to the next, if anything.
        prediction: tokens that the user expects, if any.
    """

    session: Session
    drafter: Drafter
    stopper: Stopper
    stats: Stats = field(default_factory=Stats)
    drafter_cache: DrafterCache | None = None
    prediction: Sequence[int] = ()

    def __post_init__(self) -> None:
        self.context = Context(self.session.sampler, self.drafter_cache, self.prediction, self.session.prompt_top_k)
        self.drafter.begin(self.context)

    @classmethod
    def begin(
        cls,
        target: Target,
        tokens: Sequence[int],
        drafter: Drafter,
        sampling: SamplingParams,
        stop: StopParams,
        *,
        text: Callable[[int], str] | None = None,
        stats: Stats | None = None,
        drafter_cache: DrafterCache | None = None,
        prediction: Sequence[int] = (),
    ) -> Self:
        """Reads the prompt.

        Args:
            tokens: the prompt.
            text: what a token adds to the text, for stop strings.
            stats: of the text, if it goes on from earlier ones.

        Raises:
            LeapaheadError: what `Target.open` raises, and what the drafter raises of what it cannot serve.
        """
        stats = Stats() if stats is None else stats
        stopper = Stopper(stop, tokens, target.context_length, text)
        reserve = len(tokens) + stop.max_new_tokens
        top_k = drafter.prompt_top_k if stop.max_new_tokens > SHORT else 0
        session = target.open(tokens, sampling, stats, reserve=reserve, top_k=top_k)
        try:
            return cls(session, drafter, stopper, stats, drafter_cache, prediction)
        except BaseException:
            session.close()
            raise

    def close(self) -> None:
        """Gives the session back, and what the drafter holds. Closing twice is harmless."""
        self.session.close()
        self.drafter.close()

    @property
    def finished(self) -> bool:
        return self.stopper.finish_reason is not None

    def budget(self, target: Target) -> Budget:
        """It ends where the text must end."""
        return Budget(nodes=target.max_nodes - 1, depth=self.stopper.room - 1, leaves=target.max_leaves)

    def checked(self, proposal: Proposal, budget: Budget, target: Target) -> Proposal:
        """A draft that the target may be given."""
        tree, name = proposal.tree, self.drafter.name
        if tree.tokens[0] != self.context.root:
            raise DraftError(f"drafter {name!r} drafted over token {tree.tokens[0]}, not {self.context.root}")
        if len(tree) > 1 and not 0 <= tree.tokens.min() <= tree.tokens.max() < target.vocab_size:
            raise DraftError(f"drafter {name!r} drafted a token outside the vocabulary of {target.vocab_size}")
        sizes = (len(tree) - 1, tree.depths.max(), len(tree.leaves)) if len(tree) > 1 else (0, 0, 0)
        if sizes[0] > budget.nodes or sizes[1] > budget.depth or sizes[2] > budget.leaves:
            raise DraftError(f"drafter {name!r} drafted beyond its budget of {budget}")
        return proposal

    def advance(self, proposal: Proposal, choices: Choices, clock: Clock, forward: Forward) -> Step:
        """Verify, cut, commit, learn, count."""
        position = len(self.session.tokens) - 1
        verdict = self.stopper.cut(proposal.judge(choices) if proposal.judge else verify(proposal.tree, choices))
        checked(verdict.tokens, f"position {position + len(verdict.tokens)}")  # after the cut: EOS needs no successor
        clock.charge("verify", self.stats, choose=choices.seconds_since())
        self.session.commit(verdict)
        clock.charge("commit", self.stats)
        step = Step(proposal, choices, verdict, position, forward)
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

    def charge(self, phase: str, *stats: Stats, choose: float = 0.0) -> float:
        """Returns the seconds."""
        now = perf_counter()
        for each in stats:
            each.seconds[phase] += (now - self.last - choose) / len(stats)
            each.seconds["choose"] += choose / len(stats)
        spent, self.last = now - self.last, now
        return spent


def propose(target: Target, batch: Sequence[Generation], clock: Clock) -> list[Proposal]:
    """A draft for each; drafters of one class draft together."""
    found: dict[Generation, Proposal] = {}
    groups: dict[type[Drafter], list[tuple[Generation, Budget]]] = {}
    for generation in batch:
        budget = generation.budget(target)
        if min(budget.nodes, budget.depth) == 0:
            found[generation] = Proposal(TokenTree.root(generation.context.root))
        else:
            groups.setdefault(type(generation.drafter), []).append((generation, budget))
    for kind, members in groups.items():
        proposals = kind.propose_together(target, [Ask(g.drafter, g.context, budget) for g, budget in members])
        for (generation, budget), proposal in zip(members, proposals, strict=True):
            found[generation] = generation.checked(proposal, budget, target)
        clock.charge("draft", *(generation.stats for generation, _ in members))
    return [found[generation] for generation in batch]


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
            proposals = propose(target, batch, clock)
            trees = [proposal.tree for proposal in proposals]
            choices = target.step([s.session for s in batch], trees)
            seconds = clock.charge("forward", *(s.stats for s in batch))
            rows = len(trees) * max(map(len, trees)) if target.pads else sum(map(len, trees))
            forward = Forward(seconds, len(batch), rows)
            steps = []  # all advance before the caller may open a session: its prompt may overwrite the logits
            for generation, proposal, chosen in zip(batch, proposals, choices, strict=True):
                steps.append((generation, generation.advance(proposal, chosen, clock, forward)))
                if generation.finished:
                    generations.remove(generation)
                    generation.drafter.finish(generation.context)
                    generation.close()
                    generation.stats.drafter = generation.drafter.figures()
            yield from steps
    finally:
        for generation in generations:
            generation.close()
