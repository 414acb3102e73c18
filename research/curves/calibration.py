"""Calibration of a drafter's acceptance estimates: predicted against observed acceptance of its nodes.

    path           P(node is accepted), for every drafted node: `Proposal.expected`
    conditional    P(node) / P(parent), for the nodes whose parent was accepted

Nodes are sorted into ten bins by prediction. For a calibrated drafter, the share accepted in a bin equals the mean
prediction. The planner sums the first kind to decide which nodes pay, so a wrong estimate makes a tree too large or too
small, and never changes the text.

Only bins with at least `LEAST_NODES` nodes count for the greatest deviation that the figure states; in a smaller bin
the deviation is mostly chance.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from leapahead.bench.conditions import Data, Progress, Tokens, conditions, silent
from leapahead.core.errors import BadParameter, needing
from leapahead.core.sampling import SamplingParams
from leapahead.core.stats import Stats
from leapahead.drafters.registry import DrafterClass
from leapahead.engine.scheduler import Engine
from leapahead.models.base import Target
from leapahead.planner.draft import Step
from research.curves.run import request, require_prompts

BINS = 10
LEAST_NODES = 500  # of a bin that counts for the greatest deviation


class Trial(NamedTuple):
    """A node of which it is known whether it was right."""

    source: str
    predicted: float
    conditional: float | None  # where the parent was accepted
    accepted: bool


def trials(step: Step) -> Iterator[Trial]:
    """The drafted nodes of a step that have an estimate, except those behind the end of the text."""
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
            continue  # at any such depth: counting only the nodes below a wrong parent would bias the result
        if np.isnan(expected[node]):
            continue  # a window node, which has no estimate
        parent = int(tree.parents[node])
        known = parent in accepted and expected[parent] > 0
        alone = min(float(expected[node] / expected[parent]), 1.0) if known else None
        source = step.proposal.sources[node] if step.proposal.sources else ""
        yield Trial(source, float(expected[node]), alone, node in accepted)


def calibration(
    target: Target,
    prompts: Sequence[Tokens],
    drafter: str | DrafterClass = "auto",
    options: dict[str, Any] | None = None,
    max_new_tokens: int = 128,
    eos_token_ids: Tokens = (),
    temperature: float = 0.0,
    seed: int = 0,
    batch: int = 1,
    progress: Progress = silent,
) -> Data:
    """Predicted against observed acceptance of the nodes that a drafter drafts.

    Intervals are exact binomial ones of 95 %. They treat nodes as independent, which those of one tree are only
    approximately: at most one of several siblings is accepted, and all nodes below a wrong one are wrong.

    Args:
        drafter: must estimate acceptance (`Proposal.expected`).
        options: of the drafter.
        batch: prompts decoded together.

    Returns:
        path and conditional, see `binned`; sources: rows of name, nodes, predicted and observed of the path; steps,
        acceptance_length.

    Raises:
        BadParameter: no prompts, or a drafter without estimates.
        LeapaheadError: scipy is not installed.
    """
    with needing("an interval", "bench", "scipy"):
        pass
    require_prompts(prompts)
    if batch < 1:
        raise BadParameter(f"batch={batch} is not possible: it must be at least 1")
    engine = Engine(target, max_batch=batch)
    chosen = engine.drafter(drafter, **(options or {}))
    params = SamplingParams(temperature=temperature, seed=seed)
    found: list[Trial] = []

    def collect(step: Step) -> None:
        found.extend(trials(step))

    requests = [request(prompt, chosen, max_new_tokens, eos_token_ids, params, collect) for prompt in prompts]
    handles = [engine.submit(each) for each in requests]
    for index, handle in enumerate(handles):
        progress(chosen.name, index, len(prompts))
        engine.run([handle])
    stats = sum((handle.stats for handle in handles), Stats())
    if stats.drafted and not found:
        raise BadParameter(f"drafter {chosen.name!r} has no acceptance estimates to be compared; choose another one")
    return {
        "figure": "calibration",
        "conditions": conditions(
            target, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, prompts=len(prompts), batch=batch
        ),
        "drafter": chosen.name,
        "steps": stats.steps,
        "acceptance_length": round(stats.acceptance_length, 4) if stats.steps else None,
        "path": binned([(trial.predicted, trial.accepted) for trial in found]),
        "conditional": binned([(t.conditional, t.accepted) for t in found if t.conditional is not None]),
        "sources": _by_source(found),
    }


def binned(pairs: Sequence[tuple[float, bool]]) -> Data:
    """Pairs (predicted, accepted) by tenths of the prediction.

    Returns:
        nodes; deviation (greatest |observed - predicted| of the bins that count; None if there is none); least_nodes
        (of a bin that counts); and rows of low, high (edges), nodes, predicted (mean), observed and its `interval`.
        Empty bins are left out.
    """
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
    judged = [abs(row["observed"] - row["predicted"]) for row in rows if row["nodes"] >= LEAST_NODES]
    deviation = round(max(judged), 4) if judged else None
    return {"nodes": len(pairs), "deviation": deviation, "least_nodes": LEAST_NODES, "rows": rows}


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
