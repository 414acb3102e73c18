"""Convergence of Jacobi decoding: which tokens of a block are correct after k iterations."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import closing

import numpy as np

from leapahead.bench.conditions import Data, Progress, Tokens, conditions, silent
from leapahead.check import distinct
from leapahead.core.errors import BadParameter, Refused
from leapahead.core.sampling import SamplingParams
from leapahead.core.tree import TokenTree
from leapahead.core.verify import verify
from leapahead.models.base import CHAIN, Target, read_prompt
from research.curves.run import require_prompts


def jacobi(
    target: Target,
    prompts: Sequence[Tokens],
    block: int = 16,
    temperatures: Sequence[float] = (0.0, 1.0),
    max_new_tokens: int = 128,
    eos_token_ids: Tokens = (),
    seed: int = 0,
    progress: Progress = silent,
) -> Data:
    """Convergence of Jacobi iteration (Santilli et al., 2305.10427, algorithm 1), block after block of a text.

    A block is initialised with random tokens of the prompt. One iteration is one forward that replaces every token by
    the target's choice after the tokens before it. The iteration ends at the fixed point, which is the text of plain
    decoding, and the next block follows it. With a temperature, the Gumbel noise of a position stays the same over the
    iterations. A token is correct where it equals that of the fixed point. A block in which the text ends is left out.

    Returns:
        curves, one for each temperature: blocks; distinct_4 of the texts; `right[k][i]`, share of blocks whose position
        i is correct after k iterations (k = 0 is the initialisation); `mean[k]`, over the positions; `settled[k]`,
        share of positions that are correct with all before them, which is all that decoding may keep; `iterations` per
        block, mean and greatest; and `tokens_per_iteration`, their ratio (without the forward that confirms the last
        block).
    """
    if block < 2 or max_new_tokens < block:
        raise BadParameter(f"block={block} is not possible: it must be at least 2, and at most max_new_tokens")
    if CHAIN not in target.info.capabilities or target.max_nodes < block:
        raise Refused(f"{target.info.name} cannot read a block of {block} tokens in one forward")
    require_prompts(prompts)
    params = [SamplingParams(temperature=temperature, seed=seed) for temperature in temperatures]
    curves = []
    for number, param in enumerate(params):
        runs: list[list[list[int]]] = []  # of each block: its tokens after 0, 1, 2, ... iterations
        texts: list[list[int]] = []
        for index, prompt in enumerate(prompts):
            progress(f"temperature {param.temperature:g}", number * len(prompts) + index, len(params) * len(prompts))
            rng = random.Random(seed)
            with target.lock:
                here = list(blocks_of(target, prompt, param, block, max_new_tokens, eos_token_ids, rng))
            texts.append([token for values in here for token in values[-1]])
            runs += here
        if not runs:
            raise BadParameter(
                f"no text at temperature {param.temperature:g} is as long as a block of {block}; "
                "choose a shorter block or other prompts"
            )
        about = {"temperature": param.temperature, "distinct_4": round(distinct(texts), 4)}
        curves.append({**about, **_convergence(runs, block)})
    return {
        "figure": "jacobi",
        "conditions": conditions(target, max_new_tokens=max_new_tokens, prompts=len(prompts), seed=seed),
        "block": block,
        "curves": curves,
    }


def blocks_of(
    target: Target,
    prompt: Tokens,
    params: SamplingParams,
    block: int,
    max_new_tokens: int,
    eos_token_ids: Tokens,
    rng: random.Random,
) -> Iterator[list[list[int]]]:
    """Each block's tokens, iteration by iteration from the start to the fixed point."""
    with closing(target.open(prompt, params, reserve=len(prompt) + max_new_tokens)) as session:
        read_prompt(target, session)
        longest = min(len(prompt) + max_new_tokens, target.info.context_length)
        while len(session.tokens) + block <= longest:
            values = [[rng.choice(prompt) for _ in range(block)]]
            while True:
                tree = TokenTree.chain(session.tokens[-1], values[-1][:-1])
                choices = target.step([session], [tree])[0]
                after = choices.of(range(block)).tolist()
                # By induction, position i is correct after i + 1 iterations, unless the target is not deterministic.
                if after == values[-1] or len(values) > block + 1:
                    break
                values.append(after)
            session.commit(verify(tree, choices))
            if after != values[-1]:
                continue  # not deterministic: the verified tokens are kept, the block is not counted
            if set(after) & set(eos_token_ids):
                return
            yield values


def _convergence(runs: Sequence[list[list[int]]], block: int) -> Data:
    right = np.zeros((len(runs), block + 1, block), dtype=bool)  # [blocks, iterations, positions]
    for number, values in enumerate(runs):
        for k in range(block + 1):
            right[number, k] = np.array(values[min(k, len(values) - 1)]) == np.array(values[-1])
    settled = np.logical_and.accumulate(right, axis=2)
    taken = [len(values) - 1 for values in runs]
    return {
        "blocks": len(runs),
        "right": np.round(right.mean(axis=0), 4).tolist(),
        "mean": np.round(right.mean(axis=(0, 2)), 4).tolist(),
        "settled": np.round(settled.mean(axis=(0, 2)), 4).tolist(),
        "iterations": {"mean": round(float(np.mean(taken)), 3), "greatest": max(taken)},
        "tokens_per_iteration": round(block * len(runs) / max(sum(taken), 1), 4),
    }
