"""Counters of a generated text. Only counters and seconds are stored; every rate is a property derived from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

K = TypeVar("K")

# "choose" is the part of "verify" and "observe" in which logits are processed. Targets on an accelerator choose after
# all nodes at once, as part of "forward".
PHASES = ("draft", "forward", "choose", "verify", "commit", "observe")


class Tally(Counter[K]):
    """A `Counter` that `dataclasses.asdict` copies rightly.

    `asdict` makes the copy of a dictionary from pairs of keys and values, and a `Counter` would count the pairs.

    Args:
        counts: key -> count, or such pairs.
    """

    def __init__(self, counts: Mapping[K, int] | Iterable[tuple[K, int]] = ()) -> None:
        super().__init__(dict(counts))


@dataclass
class Stats:
    """The counters of one sequence, or the sums of many.

    Attributes:
        prompt_tokens: length of the prompt.
        prefill_forwards: target forwards that read some of the prompt; the last of them may be a step, too.
        reused_tokens: prompt tokens whose cache entries were kept from earlier requests.
        prefill_seconds: wall-clock seconds of the prefill; of a step that read a part of it, its share by tokens.
        steps: target forwards after the prefill (a batched forward is one step of each of its sequences).
        committed: tokens that steps emitted.
        nodes: tree nodes that went through the target, roots included.
        drafted: the same without the roots.
        accepted: committed tokens that had been drafted.
        preemptions: how often it gave its part of the full KV cache to others; its text was read again then.
        replayed: committed tokens that steps read once more, since a recurrent state could not discard a draft.
        drafted_by: source -> nodes drafted.
        accepted_by: source -> nodes accepted.
        accepted_at: depth -> nodes accepted at that depth (1 is the first token after the root).
        seconds: phase -> wall-clock seconds; a batched forward counts in equal shares.
        drafter: figures that the drafter reports (pool size, hit rate, ...).
    """

    prompt_tokens: int = 0
    prefill_forwards: int = 0
    reused_tokens: int = 0
    prefill_seconds: float = 0.0
    steps: int = 0
    committed: int = 0
    nodes: int = 0
    drafted: int = 0
    accepted: int = 0
    preemptions: int = 0
    replayed: int = 0
    drafted_by: Tally[str] = field(default_factory=Tally)
    accepted_by: Tally[str] = field(default_factory=Tally)
    accepted_at: Tally[int] = field(default_factory=Tally)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    drafter: dict[str, Any] = field(default_factory=dict)

    @property
    def acceptance_length(self) -> float:
        """Committed tokens per step; 1.0 for plain decoding."""
        return self.committed / self.steps if self.steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted nodes per drafted node. It is small for wide trees, since of siblings at most one is accepted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def nodes_per_step(self) -> float:
        """Tree nodes per step, roots included."""
        return self.nodes / self.steps if self.steps else 0.0

    @property
    def decode_seconds(self) -> float:
        """Wall-clock seconds of all steps, without the prefill."""
        return sum(self.seconds.values())

    @property
    def tokens_per_second(self) -> float:
        """Committed tokens per second of decoding, without the prefill."""
        return self.committed / self.decode_seconds if self.decode_seconds else 0.0

    def __add__(self, other: Stats) -> Stats:
        """The sums of the counters; `drafter`, which belongs to one sequence, is left out."""
        total = Stats()
        for name in self.__dataclass_fields__:
            if name == "drafter":
                continue
            mine, theirs = getattr(self, name), getattr(other, name)
            if name == "seconds":
                total.seconds = {phase: mine[phase] + theirs[phase] for phase in PHASES}
            elif isinstance(mine, Tally):  # copied at once, since the thread that decodes may add keys meanwhile
                setattr(total, name, Tally(Tally(mine) + Tally(theirs)))
            else:
                setattr(total, name, mine + theirs)
        return total

    def as_dict(self) -> dict[str, Any]:
        """Counters and rates as plain types, for `--json`."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "reused_tokens": self.reused_tokens,
            "prefill_forwards": self.prefill_forwards,
            "prefill_seconds": round(self.prefill_seconds, 6),
            "steps": self.steps,
            "committed": self.committed,
            "acceptance_length": round(self.acceptance_length, 4),
            "drafted": self.drafted,
            "accepted": self.accepted,
            "preemptions": self.preemptions,
            "replayed": self.replayed,
            "acceptance_rate": round(self.acceptance_rate, 4),
            "nodes_per_step": round(self.nodes_per_step, 3),
            "tokens_per_second": round(self.tokens_per_second, 2),
            "drafted_by": dict(self.drafted_by),
            "accepted_by": dict(self.accepted_by),
            "accepted_at": {str(depth): n for depth, n in sorted(self.accepted_at.items())},
            "seconds": {phase: round(s, 6) for phase, s in self.seconds.items()},
            "drafter": self.drafter,
        }
