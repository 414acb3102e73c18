"""Acceptance by the rank of a draft model's tokens, and the best draft tree that follows (Sequoia, 2402.12374).

text     decoded plainly by the target
rank     place of each of its tokens among the draft model's likeliest after the same prefix; when sampling, ranked with
         the Gumbel noise of the position added
tree     the one with the least time per token of all sizes and depths, by acceptance by rank and the latency profiles
         of target and draft model
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import NamedTuple

import numpy as np

from leapahead.bench.conditions import Data, Progress, Tokens, conditions, silent
from leapahead.core.errors import BadParameter, ContextOverflow, Refused
from leapahead.core.sampling import Sampler, SamplingParams
from leapahead.core.text import Tokenizer, difference
from leapahead.core.tree import IntArray
from leapahead.drafters.plain import Plain
from leapahead.engine.scheduler import Engine
from leapahead.models.base import PROMPT_ROWS, TOP_K, Capture, KeepsPrefixes, Target
from leapahead.planner.latency import LatencyProfile
from leapahead.planner.profile import LatencyProfiles
from research.curves.run import decode, request, require_prompts
from research.sequoia_tree import (
    FloatArray,
    Seconds,
    Shape,
    best_for_cost,
    best_shape,
    greedy_shape,
    seconds_per_token,
    values,
)

RANKS = 8  # that are counted separately, and the greatest number of children of a node
RANKED = 128  # when sampling, how many of the draft's likeliest tokens are ranked with the noise, as in drafters
DEPTHS = (1, 2, 3, 4, 6)  # the rows list the best trees of these depths, and of the greatest
Profiles = tuple[LatencyProfile, LatencyProfile]


class Counted(NamedTuple):
    """How often tokens of the text had each rank.

    Attributes:
        by_rank: counts of the first `RANKS` ranks.
        tokens: number of tokens of all texts.
    """

    by_rank: list[int]
    tokens: int


def sequoia(
    target: Target,
    draft: Target,
    prompts: Sequence[Tokens],
    nodes: int = 64,
    depth: int = 10,
    max_new_tokens: int = 128,
    eos_token_ids: Tokens = (),
    temperature: float = 0.0,
    seed: int = 0,
    ranked: int = RANKED,
    tokenizers: tuple[Tokenizer | None, Tokenizer | None] = (None, None),
    seconds: Profiles | None = None,
    progress: Progress = silent,
) -> Data:
    """The best tree for a draft model and a target on this machine.

    Args:
        draft: the draft model; its vocabulary must be the target's, or one of the two the beginning of the other.
        nodes, depth: limits of a tree, the root counted in the first.
        ranked: when sampling, how many of the draft's likeliest tokens are ranked with the noise. Tokens of the text
            that are less likely are never drafted; at temperature 1 these may be a tenth of a small model's text.
        tokenizers: of target and draft, to compare vocabularies of different sizes.
        seconds: T(n) of target and draft; measured, or read from the cache, by default.

    Returns:
        draft, its name; tokens of the texts; ranks (share of them at each rank of the draft, from the likeliest on);
        seconds of target and draft by rows; rows of nodes, greedy (expected tokens of the likeliest nodes, at any
        depth) and best (those of the dynamic programme by depth); greatest_difference of the two at equal limits;
        tree, the chosen one: parents, ranks and chances of its nodes, and nodes, depth, expected, seconds_per_token and
        speedup over plain decoding; greedy, the same figures of the tree grown by falling probability at the size where
        it is fastest; plain, seconds per token without a draft.

    Raises:
        BadParameter: no prompts, or limits that no tree satisfies.
        ContextOverflow: a prompt that leaves no room in one of the contexts.
        Refused: different vocabularies, or a draft that does not give its top-k tokens.
    """
    require_prompts(prompts)
    if nodes < 1 or depth < 0 or ranked < RANKS:
        raise BadParameter(
            f"nodes={nodes}, depth={depth} and ranked={ranked} are not possible: nodes must be at least 1, depth at "
            f"least 0 and ranked at least {RANKS}"
        )
    require(target, draft, tokenizers)
    params = SamplingParams(temperature=temperature, seed=seed)
    counted = measured(target, draft, prompts, max_new_tokens, eos_token_ids, params, ranked, progress)
    progress("latency profiles", len(prompts), len(prompts))
    costs = seconds or (_profile(target), _profile(draft))
    found = conditions(target, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, prompts=len(prompts))
    if temperature:
        found["ranked"] = ranked
    return {
        "figure": "sequoia",
        "conditions": found,
        "draft": draft.info.name,
        "tokens": counted.tokens,
        "seconds": {name: profile.as_dict() for name, profile in zip(("target", "draft"), costs, strict=True)},
        **_trees([count / counted.tokens for count in counted.by_rank], costs, min(nodes, target.max_nodes), depth),
    }


def _trees(ranks: list[float], costs: Profiles, nodes: int, depth: int) -> Data:
    """What `sequoia` returns of the trees: from the acceptance by rank and the latency profiles."""
    chosen, _ = best_for_cost(ranks, *costs, nodes, depth)
    grown = [greedy_shape(ranks, size, nodes) for size in range(1, nodes + 1)]
    table = values(ranks, nodes, depth)
    listed = sorted({level for level in DEPTHS if level < depth} | {depth})
    same = (
        abs(float(table[size, level]) - greedy_shape(ranks, size, level).expected)
        for size in range(1, nodes + 1)
        for level in listed
    )
    return {
        "ranks": [round(share, 6) for share in ranks],
        "rows": [
            {
                "nodes": size,
                "greedy": round(shape.expected, 4),
                "best": {str(level): round(float(table[size, level]), 4) for level in listed},
            }
            for size, shape in enumerate(grown, 1)
        ],
        "greatest_difference": max(same),
        "tree": {
            **_figures(chosen, *costs),
            "parents": chosen.parents.tolist(),
            "ranks": chosen.ranks.tolist(),
            "chances": [round(chance, 6) for chance in chosen.chances(ranks).tolist()],
        },
        "greedy": _figures(min(grown, key=lambda shape: seconds_per_token(shape, *costs)), *costs),
        "plain": seconds_per_token(best_shape(ranks, 1, 0), *costs),
    }


def measured(
    target: Target,
    draft: Target,
    prompts: Sequence[Tokens],
    max_new_tokens: int,
    eos_token_ids: Tokens,
    params: SamplingParams,
    ranked: int = RANKED,
    progress: Progress = silent,
) -> Counted:
    """Acceptance by rank: the target decodes plainly, then the draft model reads the text."""
    engine = Engine(target, max_batch=1)
    plain, by_rank, tokens = engine.drafter(Plain), [0] * RANKS, 0
    for index, prompt in enumerate(prompts):
        progress("texts", index, len(prompts))
        room = draft.info.context_length - 1 - len(prompt)
        if room < 1:
            raise ContextOverflow(
                f"the prompt has {len(prompt)} tokens and the context of the draft {draft.info.context_length}; "
                "shorten the prompt"
            )
        text = decode(engine, request(prompt, plain, min(max_new_tokens, room), eos_token_ids, params)).tokens
        tokens += len(text)
        top_k = RANKS if params.temperature == 0 else ranked
        found = _guesses(draft, prompt, text, params, target.info.vocab_size, top_k)
        for token, guesses in zip(text, found, strict=True):
            if token in guesses:
                by_rank[guesses.index(token)] += 1
    if not tokens:
        raise BadParameter("all texts are empty; choose other prompts")
    return Counted(by_rank, tokens)


def require(target: Target, draft: Target, tokenizers: tuple[Tokenizer | None, Tokenizer | None]) -> None:
    """Refuses a draft model whose vocabulary differs from the target's or that does not give its top-k tokens.

    Two tokenizers agree if every id that both have stands for the same text, and some texts have the same ids.

    Raises:
        Refused: they do not agree, or the sizes differ and a tokenizer is missing.
    """
    mine, theirs = draft.info, target.info
    if TOP_K not in mine.capabilities:
        raise Refused(f"{mine.name} cannot be measured as a draft model: it does not give its top-k tokens")
    sizes = f"{mine.name} has a vocabulary of {mine.vocab_size} tokens and {theirs.name} one of {theirs.vocab_size}"
    one, other = tokenizers
    if one is None or other is None:
        if mine.vocab_size != theirs.vocab_size:
            raise Refused(f"{sizes}, and without both tokenizers they cannot be compared")
        return
    if unlike := difference(one, other):
        raise Refused(f"{sizes}, and neither is the beginning of the other: {unlike}")


def _guesses(
    draft: Target, prompt: Tokens, text: Tokens, params: SamplingParams, vocab_size: int, top_k: int
) -> Iterator[list[int]]:
    """The draft model's candidates for each token of the text, likeliest first, at most `RANKS`."""
    tokens = list(prompt)
    sampler = Sampler(params, tokens, vocab_size)  # with the target's noise
    for start in range(0, len(text), PROMPT_ROWS):
        part = text[start : start + PROMPT_ROWS]
        following, logits = _top_k(draft, [*tokens, *part], top_k)
        for token, best, scores in zip(part, following[-len(part) :], logits[-len(part) :], strict=True):
            known = best < vocab_size
            candidates = best[known]
            yield candidates[sampler.rank(len(tokens), candidates, scores[known])][:RANKS].tolist()
            tokens.append(token)
            sampler.committed()


def _top_k(draft: Target, tokens: Tokens, k: int) -> tuple[IntArray, FloatArray]:
    """The (at most) k likeliest tokens after the last rows of a prompt, and their logits: [rows, k] each."""
    found, k = [], min(k, draft.info.vocab_size)
    with draft.lock:
        if isinstance(draft, KeepsPrefixes):
            draft.forget()  # rows of a reused prefix are not captured
        with closing(draft.open(tokens, SamplingParams(), Capture(top_k=k))) as session:
            while session.unread:
                if (rows := draft.prefill(session, PROMPT_ROWS)) is not None:
                    found.append(rows.top_k(k))
    return np.concatenate([each for each, _ in found]), np.concatenate([each for _, each in found])


def _profile(target: Target) -> LatencyProfile:
    """The latency profile of one sequence, from the cache or measured now."""
    profiles = LatencyProfiles(target.info)
    profiles.prepare(target)
    return profiles.profile(1)


def _figures(shape: Shape, target_seconds: Seconds, draft_seconds: Seconds) -> Data:
    taken = seconds_per_token(shape, target_seconds, draft_seconds)
    return {
        "nodes": len(shape),
        "depth": shape.depth,
        "drafted": shape.drafted,
        "expected": round(shape.expected, 4),
        "seconds_per_token": taken,
        "speedup": round(target_seconds(1) / taken, 4),
    }
