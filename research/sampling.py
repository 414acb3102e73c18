"""`python -m research sampling`: time of choosing one token, by vocabulary, parameters and kind of array."""

from __future__ import annotations

from collections.abc import Callable
from statistics import quantiles
from time import perf_counter
from typing import Any

import click
import numpy as np
import numpy.typing as npt
import torch
from rich.progress import track

from leapahead.cli.command import Command
from leapahead.core.sampling import Sampler, SamplingParams
from leapahead.core.tree import TokenTree
from research.command_parts import show

VOCABULARIES = (32_000, 49_152, 152_000)
SETTINGS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "T = 1": {},
    "top-k 50": {"top_k": 50},
    "top-p 0.9": {"top_p": 0.9},
    "min-p 0.05": {"min_p": 0.05},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1},
}
TEXT = 2000  # tokens; their number matters to penalties
NODES = 8  # of a step: a chain, so that each has a position of its own
COMMITTED = 3  # of each step


def logits_like_text(vocab_size: int, rows: int) -> npt.NDArray[np.float32]:
    """float32 [rows, vocab], falling with the logarithm of a token's rank, with noise.

    The entropy is about 2.5 nats, and top-p 0.9 keeps some 40 tokens, as in text at temperature 1.
    """
    rng = np.random.default_rng(vocab_size)
    ranks = rng.permuted(np.tile(np.arange(1.0, vocab_size + 1), (rows, 1)), axis=1)
    logits: npt.NDArray[np.float32] = (rng.normal(size=ranks.shape) - 1.65 * np.log(ranks)).astype(np.float32)
    return logits


class Choosing:
    """Steps of one sampler, one after another, each at new positions.

    Args:
        vocab_size: length of a row.
        device: None for numpy arrays; of torch's tensors otherwise. On an accelerator all nodes are chosen at once.
        given: of the sampling, beside a temperature of 1.
    """

    def __init__(self, vocab_size: int, device: str | None, given: dict[str, Any]) -> None:
        self._at_once = device not in (None, "cpu")
        to_array: Callable[[Any], Any] = (lambda a: a) if device is None else lambda a: torch.from_numpy(a).to(device)
        self._tokens = np.random.default_rng(0).integers(0, vocab_size, TEXT).tolist()
        params = SamplingParams(**{"temperature": 1.0, "seed": 1, **given})
        options: dict[str, Any] = {"on_device": True} if self._at_once else {}
        self._sampler = Sampler(params, self._tokens, vocab_size, to_array, **options)
        self._logits = to_array(logits_like_text(vocab_size, NODES))

    def step(self) -> float:
        """Seconds a node."""
        tree = TokenTree.chain(self._tokens[-1], [5] * (NODES - 1))
        groups = [list(range(NODES))] if self._at_once else [[node] for node in range(NODES)]
        began = perf_counter()
        for nodes in groups:
            self._sampler.choose(self._logits[nodes[0] : nodes[-1] + 1], tree, np.array(nodes)).tolist()
        seconds = perf_counter() - began
        self._tokens += [7] * COMMITTED
        self._sampler.committed()
        return seconds / NODES


def measured(device: str, rounds: int) -> list[list[Any]]:
    """A row for each kind of array and vocabulary: the median milliseconds a node, and the quartiles, by setting."""
    found = []
    for kind, where in (("numpy", None), (f"torch, {device}", device)):
        for vocab_size in VOCABULARIES:
            each = {name: Choosing(vocab_size, where, given) for name, given in SETTINGS.items()}
            seconds: dict[str, list[float]] = {name: [] for name in each}
            for turn in track(range(rounds + 2), description=f"{kind}, {vocab_size}"):
                for name, choosing in each.items():
                    took = choosing.step()
                    if turn >= 2:
                        seconds[name].append(1e3 * took)
            cells = [quantiles(some, n=4) for some in seconds.values()]
            found.append([kind, vocab_size, *(f"{middle:.2f} ({low:.2f}-{high:.2f})" for low, middle, high in cells)])
    return found


@click.command(cls=Command)
@click.option("--device", default="cpu", show_default=True, help="Where the tensors of the torch rows are.")
@click.option(
    "--rounds", type=click.IntRange(min=4), default=30, show_default=True, help="Measured steps of each cell."
)
def main(device: str, rounds: int) -> None:
    """Print the median milliseconds of choosing after one node, with quartiles.

    A text of 2000 tokens, steps of a chain of 8 nodes, one thread; logits are float32.
    """
    torch.set_num_threads(1)
    show(["array", "vocabulary", *SETTINGS], measured(device, rounds))
