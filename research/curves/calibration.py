"""What a drafter thinks its nodes are worth against what they were worth: predicted and observed acceptance.

    path           P(node is accepted), of every drafted node: `Proposal.expected`
    conditional    P(node) / P(parent), of the nodes whose parent was accepted: what the drafter says of a token alone

Nodes fall into ten bins by what was predicted; in a calibrated drafter's, the share accepted is the mean predicted.
The planner adds up the first to decide what pays, so an error there makes a tree too large or too small, never a text
wrong.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np

from leapahead import drafters
from leapahead.core.errors import BadParameter, needing
from leapahead.core.sampling import SamplingParams
from leapahead.drafters.base import Drafter, Step
from leapahead.engine.loop import decode
from leapahead.models.base import Target
from research.curves.run import Data, Progress, Tokens, begin, check, conditions, silent

BINS = 10
ENOUGH = 500  # nodes of a bin that is judged


class Trial(NamedTuple):
    """A node whose fate is known."""

    source: str
    predicted: float
    conditional: float | None  # where the parent was accepted
    accepted: bool


def trials(step: Step) -> Iterator[Trial]:
    """The drafted nodes of a step that had an expectation; what lies behind a stop is not known."""
    expected, tree = step.proposal.expected, step.tree
    if expected is None:
        return
    path = [0]
    for token in step.tokens:
        if (child := tree.child(path[-1], token)) is None:
            break
        path.append(child)
    accepted, cut = set(path), len(path) > len(step.tokens)
    for node in range(1, len(tree)):
        if cut and tree.depths[node] > len(step.tokens):
            continue  # whatever it hangs on: to count only those that hang on a wrong node would be unfair
        if np.isnan(expected[node]):
            continue  # a probe, which nobody hopes to be accepted
        parent = int(tree.parents[node])
        known = parent in accepted and expected[parent] > 0
        alone = min(float(expected[node] / expected[parent]), 1.0) if known else None
        source = step.proposal.sources[node] if step.proposal.sources else ""
        yield Trial(source, float(expected[node]), alone, node in accepted)


def calibration(
    target: Target,
    prompts: Sequence[Tokens],
    drafter: str | type[Drafter] = "auto",
    options: dict[str, Any] | None = None,
    max_new_tokens: int = 128,
    eos_token_ids: Tokens = (),
    temperature: float = 0.0,
    seed: int = 0,
    batch: int = 1,
    progress: Progress = silent,
) -> Data:
    """Predicted against observed acceptance of the nodes that a drafter drafts.

    Intervals are exact binomial ones of 95 %. They take nodes for independent, which those of one tree are not quite:
    of siblings one at most is accepted, and below a wrong node all are wrong.

    Args:
        drafter: must say what it expects (`Proposal.expected`).
        options: of the drafter.
        batch: prompts decoded together.

    Returns:
        path and conditional, each: nodes, deviation (greatest |observed - predicted| of bins with at least 500 nodes;
        None if there is none) and rows of low, high (edges), nodes, predicted (mean), observed, and its interval as
        `interval`; sources: rows of name, nodes, predicted and observed of the path; steps, acceptance_length.

    Raises:
        BadParameter: no prompts, or a drafter that expects nothing.
        LeapaheadError: scipy is not installed.
    """
    with needing("an interval", "lab", "scipy"):
        from scipy import stats as _
    make = drafters.factory(drafter, **(options or {}))
    kind = drafters.load(drafter) if isinstance(drafter, str) else drafter
    check(target, prompts, kind)
    if batch < 1:
        raise BadParameter(f"batch={batch} is not possible: at least 1 prompt is decoded at a time")
    params = SamplingParams(temperature=temperature, seed=seed)
    found: list[Trial] = []
    steps = committed = drafted = 0
    for start in range(0, len(prompts), batch):
        progress(kind.name, start, len(prompts))
        group = prompts[start : start + batch]
        generations = [begin(target, prompt, make(), max_new_tokens, eos_token_ids, params) for prompt in group]
        with closing(decode(target, generations)) as loop:
            for _, step in loop:
                steps += 1
                committed += len(step.tokens)
                drafted += len(step.tree) - 1
                found += trials(step)
    if drafted and not found:
        raise BadParameter(f"drafter {kind.name!r} does not say how likely its nodes are to be accepted")
    paths = [(trial.predicted, trial.accepted) for trial in found]
    conditionals = [(trial.conditional, trial.accepted) for trial in found if trial.conditional is not None]
    return {
        "figure": "calibration",
        "conditions": conditions(
            target, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, prompts=len(prompts), batch=batch
        ),
        "drafter": kind.name,
        "steps": steps,
        "acceptance_length": round(committed / steps, 4) if steps else None,
        "path": binned(paths),
        "conditional": binned(conditionals),
        "sources": _by_source(found),
    }


def binned(pairs: Sequence[tuple[float, bool]]) -> Data:
    """(predicted, accepted) by tenths of what was predicted; empty bins are left out."""
    from scipy.stats import binomtest

    bins: dict[int, list[tuple[float, bool]]] = defaultdict(list)
    for predicted, accepted in pairs:
        bins[min(max(int(BINS * predicted), 0), BINS - 1)].append((predicted, accepted))
    rows: list[Data] = []
    for index, some in sorted(bins.items()):
        hits = sum(accepted for _, accepted in some)
        interval = binomtest(hits, len(some)).proportion_ci(confidence_level=0.95)
        rows.append(
            {
                "low": index / BINS,
                "high": (index + 1) / BINS,
                "nodes": len(some),
                "predicted": round(float(np.mean([predicted for predicted, _ in some])), 4),
                "observed": round(hits / len(some), 4),
                "interval": {"low": round(float(interval.low), 4), "high": round(float(interval.high), 4)},
            }
        )
    judged = [abs(row["observed"] - row["predicted"]) for row in rows if row["nodes"] >= ENOUGH]
    return {"nodes": len(pairs), "deviation": round(max(judged), 4) if judged else None, "rows": rows}


def _by_source(found: Sequence[Trial]) -> list[Data]:
    by_source: dict[str, list[Trial]] = defaultdict(list)
    for trial in found:
        by_source[trial.source].append(trial)
    return [
        {
            "name": name,
            "nodes": len(some),
            "predicted": round(float(np.mean([trial.predicted for trial in some])), 4),
            "observed": round(sum(trial.accepted for trial in some) / len(some), 4),
        }
        for name, some in sorted(by_source.items())
    ]
