"""The compiled module, from src/native. Its classes and functions do what the Python code of the same name does."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

INTERFACE: int

def words(seed: int, position: int, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
    """The random 32 bits of the noise of tokens: int64 [n] -> uint32 [n]."""

def leaders(scores: npt.NDArray[np.float32], seed: int, position: int, unusual: float, word: int) -> list[int]:
    """`leapahead.core.noise.GumbelNoise.leaders`: float32 [vocab] -> tokens."""

def largest_at(rows: npt.NDArray[Any], k: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any]]:
    """`leapahead.core.filters.largest_at`; float32 or float64 [rows, k or more], each row contiguous."""

class SuffixAutomaton:
    """`leapahead.drafters.sources.suffix_automaton.SuffixAutomaton`."""

    def __len__(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def end(self) -> int: ...
    def add(self, token: int) -> None: ...
    def extend(self, tokens: list[int]) -> None: ...
    def restart(self) -> None: ...
    def step(self, state: int, token: int) -> int | None: ...
    def followers(self, state: int, limit: int) -> list[tuple[int, int]]: ...
    def link(self, state: int) -> int: ...
    def length(self, state: int) -> int: ...
    def settled(self, state: int, length: int) -> int: ...
    def advance(self, state: int, length: int, token: int, max_links: int = -1) -> tuple[int, int]: ...

class AcceptanceTable:
    """`leapahead.planner.acceptance.AcceptanceTable` and the parameters of its mixer."""

    def set_prior(self, key: tuple[Any, ...], estimate: float) -> None: ...
    def probability(self, key: tuple[Any, ...]) -> float: ...
    def estimate(self, key: tuple[Any, ...], unknown: float) -> float: ...
    def learn(self, key: tuple[Any, ...], hit: bool) -> None: ...
    def rows(self, longest: int) -> list[tuple[tuple[Any, ...], float, float, float]]:
        """Key, hits, trials and estimate of all counted keys of at most `longest` elements, in no order."""
    def set_mixer(self, mode: str, place: int, source: str, parameters: list[list[float]]) -> None: ...
    def mixer_rows(self) -> list[tuple[str, int, str, list[list[float]]]]: ...

class Adjacency:
    """What `leapahead.drafters.sources.recycling.Adjacency` holds."""

    def __init__(self, capacity: int) -> None: ...
    def __len__(self) -> int: ...
    def get(self, key: Sequence[int]) -> tuple[tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]], int] | None: ...
    def put(self, key: Sequence[int], tokens: npt.NDArray[np.int32], logp: npt.NDArray[np.float32]) -> None: ...
    def arrays(self) -> tuple[npt.NDArray[Any], ...]:
        """`before`, `tokens`, `counts`, `following`, `logp`."""
    def merge(
        self,
        before: npt.NDArray[np.int32],
        tokens: npt.NDArray[np.int32],
        counts: npt.NDArray[np.int32],
        following: npt.NDArray[np.int32],
        logp: npt.NDArray[np.float32],
    ) -> None: ...

class Source:
    """A source of the compiled search, which makes it read the text and observe the steps."""

    @property
    def name(self) -> str: ...

class PythonSource(Source):
    """The adapter of a `leapahead.planner.source.Source` for one `SequenceView`."""

    def __init__(self, source: Any, sequence: Any) -> None: ...
    def state(self, state: int) -> Any: ...

class Suffix(Source):
    """`leapahead.drafters.sources.suffix.Suffix`."""

    def __init__(self, automaton: SuffixAutomaton) -> None: ...
    def read(self, last: list[int], fresh: int, volumes: list[tuple[SuffixAutomaton, int]] | None) -> None:
        """Reads the text's new tokens.

        Args:
            last: the last tokens of the text, 32 at least where there are so many.
            fresh: how many of them are new.
            volumes: the automata over past texts, each with the number of its texts, if anything has changed there.
        """

class Recycling(Source):
    """`leapahead.drafters.sources.recycling.Recycling`. Rows are int64 and float64 [contexts, k or more]."""

    def __init__(self, k: int, longest: int, shared: Adjacency | None) -> None: ...
    def __len__(self) -> int: ...
    def read_rows(self, text: list[int], following: npt.NDArray[np.int64], logits: npt.NDArray[np.float64]) -> None:
        """Enters the rows of the last tokens of `text`."""

class Siblings(Source):
    """`leapahead.drafters.sources.siblings.Siblings`."""

    def __init__(self, k: int) -> None: ...
    def __len__(self) -> int: ...

class TokenTable(Source):
    """`leapahead.drafters.sources.token_table.TableSource`; float16 log-probabilities are given by their bits."""

    def __init__(self, tokens: npt.NDArray[np.int32], logp: npt.NDArray[np.uint16]) -> None: ...

class Search:
    """`leapahead.planner.tree_search.TreeSearch`. Modes: 0 greedy, 1 sampled, 2 unaware."""

    def __init__(
        self,
        sources: list[Source],
        table: AcceptanceTable,
        mode: int,
        seed: int,
        temperature: float,
        correction: float,
        filter: Callable[[list[int], list[int]], list[bool]] | None,
    ) -> None:
        """The correction's factor at the beginning; the search keeps it up to date itself.

        The filter is given a path below the root and tokens, and tells for each of them whether it may come next.
        """
    def begin(self, tokens: list[int], nodes: int, depth: int, leaves: int) -> None:
        """Begins the search for the next tree of a text. Its sources read what is new in it."""
    def __len__(self) -> int: ...
    @property
    def bound(self) -> float: ...
    @property
    def next(self) -> float: ...
    @property
    def likeliest(self) -> int | None: ...
    @property
    def expected(self) -> list[float]: ...
    @property
    def leaves(self) -> int: ...
    @property
    def deepest(self) -> int: ...
    def take(self) -> bool: ...
    def take_all(self, nodes: int) -> int: ...
    def observe(
        self,
        text: list[int],
        position: int,
        tokens: list[int],
        parents: list[int],
        path: tuple[int, ...],
        committed: tuple[int, ...],
        top_k: Callable[[int], tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]],
    ) -> None:
        """The sources, the estimates and the correction learn from a step.

        Args:
            text: with the committed tokens.
            position: of the tree's root.
            tokens, parents: of the tree.
            path, committed: see `Verdict`.
            top_k: gives the likeliest tokens after every node and their logits.
        """
    def states(self, source: int) -> list[tuple[int, float, float]]: ...
    def tree(self, size: int) -> tuple[list[int], list[int], list[int], tuple[str, ...], bytes]:
        """Tokens, parents, depths, names of sources and P (float64, in memory) of the first `size` nodes."""

def take_all(searches: list[Search], nodes: int) -> list[int]: ...
def best_sizes(
    searches: list[Search],
    seconds: list[float],
    sizes: list[int],
    replay: Sequence[int],
    sequences: int,
    others: int,
    longest: int,
    replays: bool,
    branches: bool,
    padded: bool,
    spent: float,
    resizing: float,
    base: float,
    per_node: float,
) -> list[int]:
    """`leapahead.planner.sizing.best_sizes`.

    Args:
        searches: with nothing taken.
        seconds: of a forward by its number of rows, all sequences together; larger ones are not possible.
        sizes: numbers of rows that are looked at ahead.
        replay: of each tree the tokens that are replayed before its root.
        sequences: of the forward.
        others, longest: rows of the sequences that draft nothing; the most of one of them.
        replays: whether a draft that is not accepted whole is read again.
        branches: whether every path of a tree takes as many rows as the longest.
        padded: whether all sequences have as many rows as the longest.
        spent, resizing, base, per_node: seconds outside the forward: so far, if there are drafted nodes, always, and
            for each drafted node.
    """
