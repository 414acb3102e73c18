"""What a step costs outside the target's forward, on a model with the shapes and so the cost of a 135M one."""

from __future__ import annotations

from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from rich.progress import track
from transformers import LlamaConfig, LlamaForCausalLM

from leapahead.core.sampling import SamplingParams
from leapahead.core.stats import PHASES
from leapahead.core.stop import StopParams, Stopper
from leapahead.core.tree import Budget, TokenTree, TreeBuilder
from leapahead.drafters.base import Context, Proposal
from leapahead.drafters.lookahead import Lookahead
from leapahead.engine.loop import Generation, decode
from leapahead.models.transformers.model import TransformersTarget

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
    """Lookahead whose tree is filled up with random tokens, half of them deep, to exactly `nodes` nodes."""

    name = "full_tree"

    def __init__(self, nodes: int = 64) -> None:
        super().__init__(window=8, ngram=5, guesses=8)
        self.nodes = nodes
        self._rng = np.random.default_rng(0)

    def propose(self, context: Context, budget: Budget) -> Proposal:
        tree = super().propose(context, Budget(nodes=self.nodes - 1, depth=budget.depth, leaves=budget.leaves)).tree
        builder = TreeBuilder.of(tree, budget)
        while len(builder) < self.nodes:
            builder.add(len(builder) - 1 if len(builder) % 2 else 0, int(self._rng.integers(context.vocab_size)))
        return Proposal(builder.build())


def target_135m(dtype: torch.dtype = torch.bfloat16) -> TransformersTarget:
    """Random weights: outputs mean nothing, costs are a 135M model's.

    The last norm is scaled so that the next token has an entropy of 2.6 nats, about that of text. Left flat, as weights
    come from their initialisation, the noise alone would choose every token, and at temperature 1 a window token would
    be right whatever stands before it.
    """
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SMOLLM2_135M)).to(dtype).eval()
    model.model.norm.weight.data *= 12
    return TransformersTarget(model, name=f"random llama, 135M shapes, {str(dtype).removeprefix('torch.')}")


def overhead(
    target: TransformersTarget, contexts: tuple[int, ...] = (250, 4000), steps: int = 60
) -> list[dict[str, Any]]:
    """Median milliseconds per phase of a 64-node step, greedy and sampled, at each context length.

    Returns:
        Rows with context, temperature, nodes, tokens committed per step, medians of the phases, of their sum without
        forward and choose (`outside_ms`), and of the forward of one token, all in milliseconds; and what part of this
        forward and of that of one token the sum is, and choosing is of this one.
    """
    rows = []
    for context in contexts:
        prompt = np.random.default_rng(context).integers(0, target.vocab_size, context).tolist()
        single = forward_ms(target, prompt, nodes=1)
        for temperature in (0.0, 1.0):
            params = SamplingParams(temperature=temperature, seed=1)
            session = target.open(prompt, params)
            generation = Generation(session, FullTree(), Stopper(StopParams(max_new_tokens=4096), prompt))
            seen: list[dict[str, float]] = []
            before = dict(generation.stats.seconds)
            nodes, committed = [], []
            loop = decode(target, [generation])
            for _ in track(range(steps + 5), description=f"overhead at {context} tokens, temperature {temperature:g}"):
                _, step = next(loop)
                now = dict(generation.stats.seconds)
                seen.append({phase: 1e3 * (now[phase] - before[phase]) for phase in PHASES})
                before = now
                nodes.append(len(step.tree))
                committed.append(len(step.tokens))
            loop.close()
            medians = {phase: median(each[phase] for each in seen[5:]) for phase in PHASES}
            outside = median(sum(each[p] for p in PHASES if p not in ("forward", "choose")) for each in seen[5:])
            rows.append(
                {
                    "context": context,
                    "temperature": temperature,
                    "nodes": median(nodes),
                    "committed": round(sum(committed[5:]) / steps, 2),
                    **{f"{phase}_ms": round(ms, 3) for phase, ms in medians.items()},
                    "outside_ms": round(outside, 3),
                    "single_forward_ms": round(single, 2),
                    "of_single_forward": round(outside / single, 4),
                    "of_this_forward": round(outside / medians["forward"], 4),
                    "choose_of_this_forward": round(medians["choose"] / medians["forward"], 4),
                }
            )
    return rows


def forward_ms(target: TransformersTarget, prompt: list[int], nodes: int, rounds: int = 15) -> float:
    """Median milliseconds of a step's forward over a chain of `nodes` nodes."""
    return _forwards(target, prompt, [nodes], rounds)[nodes]


def cost_curve(
    target: TransformersTarget, prompt: list[int], sizes: tuple[int, ...], rounds: int = 15
) -> dict[int, float]:
    """T(n) in milliseconds for n nodes; the sizes are interleaved, round by round."""
    return _forwards(target, prompt, list(sizes), rounds)


def _forwards(target: TransformersTarget, prompt: list[int], sizes: list[int], rounds: int) -> dict[int, float]:
    session = target.open(prompt, SamplingParams())
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
