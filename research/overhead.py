"""`python -m research overhead`: time of a step outside the target's forward, on the shapes of a 135M model.

The engine's part of it alone is measured by `toy_overhead`.
"""

from __future__ import annotations

from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import click
import numpy as np
import torch
from rich.progress import track
from transformers import LlamaConfig, LlamaForCausalLM

from leapahead.cli.command import Command
from leapahead.core.sampling import SamplingParams
from leapahead.core.stats import PHASES, Stats
from leapahead.core.stop import StopParams
from leapahead.core.tree import Budget, TokenTree, TreeBuilder
from leapahead.drafters.lookahead import Lookahead
from leapahead.engine.request import Request
from leapahead.engine.scheduler import Engine
from leapahead.models.base import read_prompt
from leapahead.models.loading import load
from leapahead.models.toy import ToyTarget
from leapahead.models.transformers.model import TransformersTarget
from leapahead.planner.draft import Proposal, SequenceView
from research import toy_overhead
from research.command_parts import show

WARM_UP = 5  # steps

SMOLLM2_135M = {  # shapes of HuggingFaceTB/SmolLM2-135M, from its config.json
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


class FullTree(Lookahead):
    """Lookahead with its tree filled up to exactly `nodes` nodes by random tokens, half of them in one deep path."""

    name = "full_tree"

    def __init__(self, nodes: int = 64) -> None:
        super().__init__(window=8, ngram=5, guesses=8)
        self.nodes = nodes
        self._rng = np.random.default_rng(0)

    def propose(self, sequence: SequenceView, budget: Budget) -> Proposal:
        limited = Budget(nodes=self.nodes - 1, depth=budget.depth, leaves=budget.leaves)
        builder = TreeBuilder.of(super().propose(sequence, limited).tree, budget)
        while len(builder) < self.nodes:
            builder.add(len(builder) - 1 if len(builder) % 2 else 0, int(self._rng.integers(sequence.vocab_size)))
        return Proposal(builder.build())


def target_135m(dtype: torch.dtype = torch.bfloat16) -> TransformersTarget:
    """A model with random weights and the cost of a 135M model.

    The last norm is scaled so that the next token has an entropy of 2.6 nats, about that of text. With freshly
    initialised weights the distribution would be nearly flat, so that at temperature 1 the Gumbel noise alone would
    choose every token, whatever the context, and window tokens would always be accepted.
    """
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SMOLLM2_135M)).to(dtype).eval()
    model.model.norm.weight.data *= 12
    return TransformersTarget(model, name=f"random llama, 135M shapes, {str(dtype).removeprefix('torch.')}")


def overhead(
    target: TransformersTarget, contexts: tuple[int, ...] = (250, 4000), steps: int = 60
) -> list[dict[str, Any]]:
    """Median milliseconds of the phases of a 64-node step, greedy and sampled, at each context length.

    Returns:
        Rows with context, temperature, nodes, tokens committed per step, medians of the phases, of their sum without
        forward and choose (`outside_ms`), and of the forward of one token, all in milliseconds; the sum as a share of
        this forward and of that of one token; and choosing as a share of this forward.
    """
    rows = []
    for context in contexts:
        prompt = np.random.default_rng(context).integers(0, target.info.vocab_size, context).tolist()
        single = forward_ms(target, prompt, nodes=1)
        for temperature in (0.0, 1.0):
            seen = _steps(target, prompt, temperature, steps + WARM_UP)[WARM_UP:]
            medians = {phase: median(each.phases[phase] for each in seen) for phase in PHASES}
            outside = median(sum(each.phases[p] for p in PHASES if p not in ("forward", "choose")) for each in seen)
            rows.append(
                {
                    "context": context,
                    "temperature": temperature,
                    "nodes": median(each.nodes for each in seen),
                    "committed": round(sum(each.committed for each in seen) / steps, 2),
                    **{f"{phase}_ms": round(ms, 3) for phase, ms in medians.items()},
                    "outside_ms": round(outside, 3),
                    "single_forward_ms": round(single, 2),
                    "of_single_forward": round(outside / single, 4),
                    "of_this_forward": round(outside / medians["forward"], 4),
                    "choose_of_this_forward": round(medians["choose"] / medians["forward"], 4),
                }
            )
    return rows


class _Step(NamedTuple):
    phases: dict[str, float]  # milliseconds
    nodes: int
    committed: int


def _steps(target: TransformersTarget, prompt: list[int], temperature: float, count: int) -> list[_Step]:
    """So many steps of one text."""
    engine, found = Engine(target, max_batch=1), list[_Step]()
    request = Request(
        prompt,
        engine.drafter(FullTree),
        sampling=SamplingParams(temperature=temperature, seed=1),
        stop=StopParams(max_new_tokens=4096),
    )
    handle = engine.submit(request)
    before = Stats()
    for _ in track(range(count), description=f"overhead at {len(prompt)} tokens, temperature {temperature:g}"):
        while handle.stats.steps == before.steps:  # the first one reads the prompt as well
            engine.step()
        now = handle.stats
        phases = {phase: 1e3 * (now.seconds[phase] - before.seconds[phase]) for phase in PHASES}
        found.append(_Step(phases, now.nodes - before.nodes, now.committed - before.committed))
        before = now + Stats()  # a copy
    engine.cancel(handle)
    return found


def forward_ms(target: TransformersTarget, prompt: list[int], nodes: int, rounds: int = 15) -> float:
    """Median milliseconds of a forward over a chain of `nodes` nodes."""
    return _forwards(target, prompt, [nodes], rounds)[nodes]


def cost_curve(
    target: TransformersTarget, prompt: list[int], sizes: tuple[int, ...], rounds: int = 15
) -> dict[int, float]:
    """T(n) in milliseconds for n nodes; every round measures all sizes."""
    return _forwards(target, prompt, list(sizes), rounds)


def _forwards(target: TransformersTarget, prompt: list[int], sizes: list[int], rounds: int) -> dict[int, float]:
    session = target.open(prompt, SamplingParams())
    read_prompt(target, session)
    times: dict[int, list[float]] = {size: [] for size in sizes}
    for turn in range(rounds + 2):
        for size in sizes:
            tree = TokenTree.chain(session.tokens[-1], prompt[: size - 1])
            start = perf_counter()
            choices = target.step([session], [tree])[0]
            _ = choices.logits
            if turn >= 2:
                times[size].append(1e3 * (perf_counter() - start))
    session.close()
    return {size: median(each) for size, each in times.items()}


@click.command(cls=Command)
@click.option("--steps", type=click.IntRange(min=1), default=60, show_default=True, help="Measured steps of each row.")
@click.option("--toy", is_flag=True, help="Microseconds of a 16-node step on the toy target, by batch size.")
@click.option("--model", metavar="MODEL", help="The same steps on this model, a folder or a GGUF file.")
@click.option("--context", type=click.IntRange(min=1), metavar="N", help="Tokens of the prompt of these steps.")
def main(steps: int, toy: bool, model: str | None, context: int | None) -> None:
    """Print the median time of the phases of a step: milliseconds with 64 nodes on the shapes of a 135M model.

    With --toy or --model: microseconds a sequence, without forward and choosing, of 16 nodes that are drafted
    beforehand, so that what is left is the engine's work and the target's commit. With --toy also: the same with
    the drafting, and steps of `plain` and `auto` that draft nothing.
    """
    if toy or model:
        target = load(model).target if model else ToyTarget(vocab_size=64)
        tables = [toy_overhead.overhead(target, context=context or 8192, steps=steps)]
        if toy:
            tables.append(toy_overhead.whole_steps(context=context or 8192, steps=steps))
            tables.append(toy_overhead.plain_steps(context=context or 8192, steps=steps))
    else:
        tables = [overhead(target_135m(), steps=steps)]
    for rows in tables:
        show(list(rows[0]), [list(row.values()) for row in rows])
