"""Acceptance by the rank of a draft model's token, and the tree that Sequoia makes of it (2402.12374).

text     decoded plainly by the target
rank     where its token stands among the draft's best after the same tokens; under the dice when sampling
tree     of all sizes and depths, that of the least time for a token: acceptance by rank, T(n) of target and draft
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import NamedTuple

from leapahead.core.errors import BadParameter, ContextOverflow, Refused
from leapahead.core.sampling import Sampler, SamplingParams
from leapahead.core.text import Tokenizer, difference
from leapahead.drafters.plain import Plain
from leapahead.models.base import PROMPT_ROWS, TOP_K, Forgetful, Target
from leapahead.planner.latency import CostCurve
from leapahead.planner.profile import machine_of
from research.curves.run import Data, Progress, Tokens, begin, check, conditions, silent, walk
from research.sequoia_tree import Seconds, Shape, best_for_cost, best_shape, greedy_shape, seconds_per_token, values

RANKS = 8  # that are told apart, and the most children of a node
LOOKED = 128  # of the draft's likeliest tokens, those that the dice put in order: as many as drafters keep
DEPTHS = (1, 2, 3, 4, 6)  # whose trees are listed, and the greatest
Curves = tuple[CostCurve, CostCurve]


class Counted(NamedTuple):
    """How often a token of the text had each rank.

    Attributes:
        by_rank: of the first `RANKS`.
        tokens: of all texts.
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
    looked: int = LOOKED,
    tokenizers: tuple[Tokenizer | None, Tokenizer | None] = (None, None),
    seconds: Curves | None = None,
    progress: Progress = silent,
) -> Data:
    """The tree that a draft model should draft for a target on this machine.

    Args:
        draft: guesses; its vocabulary must be the target's, or one of them the beginning of the other.
        nodes, depth: greatest of a tree, the root counted in the first.
        looked: when sampling, how many of the draft's likeliest tokens are put in order by the dice. What the target
            takes from further down is never guessed; at temperature 1 that may be a tenth of a small model's text.
        tokenizers: of target and draft; they tell whether vocabularies of two sizes belong together.
        seconds: T(n) of target and draft; measured, or read from the cache, if they are not given.

    Returns:
        draft, its name; tokens of the texts; ranks (share of them at each of the draft's ranks, from the likeliest on);
        seconds of target and draft by rows; rows of nodes, greedy (expected tokens of the likeliest nodes, at any
        depth) and best (those of the dynamic programme by depth); greatest_difference of the two at equal limits;
        tree, the chosen one: parents, ranks and chances of its nodes, and nodes, depth, expected, seconds_per_token and
        speedup over plain decoding; greedy, the same figures of the tree grown by falling chance at the size where it
        is fastest; plain, seconds per token without a draft.

    Raises:
        BadParameter: no prompts, or limits that no tree satisfies.
        ContextOverflow: a prompt that leaves no room in one of the contexts.
        Refused: other vocabularies, or a draft that does not tell its best tokens.
    """
    check(target, prompts)
    if nodes < 1 or depth < 0 or looked < RANKS:
        raise BadParameter(
            f"nodes={nodes}, depth={depth} and looked={looked} are not possible: a tree has a root, at depth 0, and "
            f"{RANKS} ranks are told apart"
        )
    require(target, draft, tokenizers)
    params = SamplingParams(temperature=temperature, seed=seed)
    counted = measured(target, draft, prompts, max_new_tokens, eos_token_ids, params, looked, progress)
    progress("cost curves", len(prompts), len(prompts))
    costs = seconds or (machine_of(target).curve(target, 1), machine_of(draft).curve(draft, 1))
    ranks = [count / counted.tokens for count in counted.by_rank]
    nodes = min(nodes, target.max_nodes)
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
        "figure": "sequoia",
        "conditions": conditions(
            target,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed,
            prompts=len(prompts),
            **({"looked": looked} if temperature else {}),
        ),
        "draft": draft.name,
        "tokens": counted.tokens,
        "ranks": [round(share, 6) for share in ranks],
        "seconds": {name: curve.as_dict() for name, curve in zip(("target", "draft"), costs, strict=True)},
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
    looked: int = LOOKED,
    progress: Progress = silent,
) -> Counted:
    """Acceptance by rank: the target decodes plainly, and the draft reads along."""
    by_rank, tokens = [0] * RANKS, 0
    for index, prompt in enumerate(prompts):
        progress("texts", index, len(prompts))
        room = draft.context_length - 1 - len(prompt)
        if room < 1:
            raise ContextOverflow(
                f"the prompt has {len(prompt)} tokens and the context of the draft {draft.context_length}; shorten the "
                "prompt"
            )
        generation = begin(target, prompt, Plain(), min(max_new_tokens, room), eos_token_ids, params)
        text = [token for step in walk(target, generation) for token in step.tokens]
        tokens += len(text)
        top_k = RANKS if params.temperature == 0 else looked
        for token, guesses in zip(text, _guesses(draft, prompt, text, params, target.vocab_size, top_k), strict=True):
            if token in guesses:
                by_rank[guesses.index(token)] += 1
    if not tokens:
        raise BadParameter("no text has a token, so there is nothing to guess; take other prompts")
    return Counted(by_rank, tokens)


def require(target: Target, draft: Target, tokenizers: tuple[Tokenizer | None, Tokenizer | None]) -> None:
    """Whether the draft's tokens mean what the target's do, and can be read.

    Tokenizers agree if all ids that both have stand for the same text, and some texts have the same ids.

    Raises:
        Refused: they do not, or sizes differ and there are no tokenizers to ask.
    """
    if TOP_K not in draft.capabilities:
        raise Refused(f"{draft.name} cannot be measured as a draft: it does not tell its best tokens")
    sizes = f"{draft.name} has a vocabulary of {draft.vocab_size} tokens and {target.name} one of {target.vocab_size}"
    one, other = tokenizers
    if one is None or other is None:
        if draft.vocab_size != target.vocab_size:
            raise Refused(f"{sizes}, and there are no tokenizers to tell whether one is the beginning of the other")
        return
    if unlike := difference(one, other):
        raise Refused(f"{sizes}, and neither is the beginning of the other: {unlike}")


def _guesses(
    draft: Target, prompt: Tokens, text: Tokens, params: SamplingParams, vocab_size: int, top_k: int
) -> Iterator[list[int]]:
    """What the draft would guess for each token of the text, likeliest first: `RANKS` at most."""
    tokens = list(prompt)
    sampler = Sampler(params, tokens, vocab_size)  # the dice are the target's
    if isinstance(draft, Forgetful):
        draft.forget()  # what need not be read again would not be told
    for start in range(0, len(text), PROMPT_ROWS):
        part = text[start : start + PROMPT_ROWS]
        with closing(draft.open([*tokens, *part], SamplingParams(), top_k=top_k)) as session:
            seen = session.prompt_top_k
        assert seen is not None  # the capability was asked for
        for token, following, logits in zip(part, seen.following[-len(part) :], seen.logits[-len(part) :], strict=True):
            known = following < vocab_size
            best = following[known]
            yield best[sampler.rank(len(tokens), best, logits[known])][:RANKS].tolist()
            tokens.append(token)
            sampler.committed()


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
