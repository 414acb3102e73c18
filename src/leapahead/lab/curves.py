"""What the figures show: the numbers behind each curve, as plain types that become JSON.

    cost          T(n) of a target                       expected      tokens of one draft, by formula
    compression   S of lookahead against log2(W = G)     jacobi        who is right after k iterations
    pool          size and hits as the text grows        match         accepted tokens by match length

Knows targets and drafters; neither files nor plots nor the command line.
"""

from __future__ import annotations

import math
import platform
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from time import perf_counter
from typing import Any

import numpy as np

from leapahead import __version__, drafters
from leapahead.check import distinct
from leapahead.decode import Generation, decode
from leapahead.drafter import Drafter, Step
from leapahead.drafters.lookahead import Lookahead
from leapahead.drafters.prompt_lookup import PromptLookup
from leapahead.errors import BadParameter, ContextOverflow, Refused, needing
from leapahead.lab.conditions import cpu
from leapahead.sampling import SamplingParams
from leapahead.stats import Stats
from leapahead.stop import StopParams, Stopper
from leapahead.target import CHAIN, Target, require
from leapahead.tree import TokenTree
from leapahead.verify import verify

Data = dict[str, Any]
Tokens = Sequence[int]
Progress = Callable[[str, int, int], None]  # what is being done, how much of it is done, how much there is

GREEDY = SamplingParams()
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
WARM_UP = 2  # rounds of `cost` that are not counted
CHECKPOINTS = (0, 16, 32, 64, 128, 256, 512, 1024)  # new tokens, of `pool`
ENOUGH = 5  # drafts; the bootstrap of fewer is narrower than what is known
LONGEST = 512  # draft that `expected` looks at for the best


def silent(what: str, done: int, total: int) -> None:
    """No progress."""


def conditions(target: Target | None = None, **more: Any) -> Data:
    """What must stand beside every figure: versions, machine, model, and what the caller adds."""
    found: Data = {"leapahead": __version__, "python": platform.python_version()}
    if target is None:
        return {**found, **more}
    for package in ("torch", "transformers", "llama_cpp"):
        if package in sys.modules:  # what decodes has been imported
            try:
                found[package] = version(package.replace("llama_cpp", "llama-cpp-python"))
            except PackageNotFoundError:  # imported from a folder
                found[package] = "unknown"
    if "torch" in sys.modules:
        found["torch_threads"] = sys.modules["torch"].get_num_threads()
    return {**found, "machine": cpu(), "target": target.name, "precision": target.precision, **more}


# ---------------------------------------------------------------------------------------------------------- cost


def cost(
    target: Target,
    text: Tokens,
    contexts: Sequence[int] = (128, 512),
    sizes: Sequence[int] = SIZES,
    rounds: int = 15,
    seed: int = 0,
    progress: Progress = silent,
    clock: Callable[[], float] = perf_counter,
) -> Data:
    """The cost curve T(n): wall-clock time of a forward over a chain of n nodes, against that of one node.

    Every round measures every size once, in an order of its own, so that a machine that slows down slows all of them;
    T(n)/T(1) is taken within a round. The time includes reading one choice, without which an accelerator may not have
    finished, and nothing is committed.

    Args:
        text: tokens to fill the context and the chains with, repeated as needed.
        contexts: lengths of context, each a curve.
        sizes: n; 1 is always measured.
        rounds: that count; two more come before.
        seed: of the orders.

    Returns:
        rows of context, nodes, and median, low and high (quartiles) of `milliseconds` and of `relative`.

    Raises:
        Refused: the target cannot read a chain.
        ContextOverflow: a context and its largest chain are longer than the target's.
    """
    sizes = sorted({1, *sizes})
    if sizes[0] < 1 or not contexts or min(contexts) < 1 or rounds < 1 or not text:
        raise BadParameter("contexts, sizes and rounds must be at least 1, and there must be a text")
    if CHAIN not in target.capabilities or target.max_nodes < sizes[-1]:
        most = target.max_nodes if CHAIN in target.capabilities else 1
        raise Refused(f"{target.name} reads at most {most} nodes in one forward, and {sizes[-1]} were asked for")
    if max(contexts) + sizes[-1] - 1 > target.context_length:
        raise ContextOverflow(
            f"a context of {max(contexts)} tokens and a chain of {sizes[-1]} do not fit into the "
            f"{target.context_length} of {target.name}; name shorter ones"
        )
    order, rows, turns = random.Random(seed), [], rounds + WARM_UP
    for number, context in enumerate(contexts):
        tokens = [text[index % len(text)] for index in range(context + sizes[-1])]
        trees = {size: TokenTree.chain(tokens[context - 1], tokens[context : context + size - 1]) for size in sizes}
        seconds: dict[int, list[float]] = {size: [] for size in sizes}
        with closing(target.open(tokens[:context], GREEDY, reserve=context + sizes[-1])) as session:
            for turn in range(turns):
                progress(f"context of {context} tokens", number * turns + turn, len(contexts) * turns)
                for size in order.sample(sizes, len(sizes)):
                    began = clock()
                    _ = target.step([session], [trees[size]])[0][0]
                    seconds[size].append(clock() - began)
        counted = {size: np.array(each[WARM_UP:]) for size, each in seconds.items()}
        rows += [
            {
                "context": context,
                "nodes": size,
                "milliseconds": _quartiles(1e3 * counted[size]),
                "relative": _quartiles(counted[size] / counted[1]),
            }
            for size in sizes
        ]
    return {"figure": "cost", "conditions": conditions(target, rounds=rounds), "rows": rows}


def _quartiles(values: Any) -> dict[str, float]:
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
    return {"median": round(middle, 4), "low": round(low, 4), "high": round(high, 4)}


# --------------------------------------------------------------------------------------------------- compression


def drafts_yield(alpha: float, length: int, drafts: float) -> float:
    """Expected tokens of one step with several independent drafts, bonus included (2402.02057, equation 5).

    E = (γ + 1) - sum over i = 1..γ of (1 - α^i)^b, with γ the length and b the number of drafts; b = 1 is equation 4.
    """
    return length + 1 - math.fsum((1 - alpha**i) ** drafts for i in range(1, length + 1))


def compression_formula(alpha: float, f: float, ngram: int, window: float) -> float:
    """S = (f - 1 + E(α, N-1, W)) / f: one step in about f has a useful speculation (2402.02057, equation 7)."""
    return (f - 1 + drafts_yield(alpha, ngram - 1, window)) / f


@dataclass(frozen=True)
class Fit:
    """The formula's two numbers.

    Attributes:
        alpha: probability that a drafted token is right, 0 < alpha < 1.
        f: about one step in f has a useful speculation, >= 1.
        rms: root mean square of measured minus formula.
        points: how many were fitted.
    """

    alpha: float
    f: float
    rms: float
    points: int


def fit(points: Sequence[tuple[int, int, float]]) -> Fit:
    """Least squares over (N, W, S).

    Raises:
        BadParameter: fewer than three points, or no step anywhere that yields more than one token.
        LeapaheadError: scipy is not installed.
    """
    _enough([(ngram, window) for ngram, window, _ in points])
    if max(s for _, _, s in points) <= 1:
        raise BadParameter("there is nothing to fit: no draft was accepted, step compression is 1 everywhere")
    optimize = _optimize()

    def residuals(x: Any) -> list[float]:
        return [compression_formula(x[0], x[1], ngram, window) - s for ngram, window, s in points]

    bounds = ([1e-6, 1.0], [1 - 1e-6, np.inf])
    # From several starts: with a large f the curve hardly depends on alpha, and a search that begins there stays.
    found = [optimize.least_squares(residuals, (start, 2.0), bounds=bounds) for start in (0.2, 0.5, 0.8)]
    best = min(found, key=lambda each: float(each.cost))
    rms = math.sqrt(2 * float(best.cost) / len(points))
    return Fit(round(float(best.x[0]), 4), round(float(best.x[1]), 4), round(rms, 4), len(points))


def _enough(pairs: Sequence[tuple[int, int]]) -> None:
    if len(set(pairs)) < 3:
        raise BadParameter("alpha and f cannot be fitted to fewer than three points; name more sizes or n-gram lengths")


def _optimize() -> Any:
    with needing("the fit", "lab", "scipy"):
        from scipy import optimize
    return optimize


def compression(
    target: Target,
    prompts: Sequence[Tokens],
    ngrams: Sequence[int] = (3, 5, 7),
    windows: Sequence[int] = (1, 2, 4, 8, 16, 32),
    max_new_tokens: int = 128,
    eos_token_ids: Tokens = (),
    progress: Progress = silent,
) -> Data:
    """Step compression S of greedy lookahead decoding by N and W = G, and the formula fitted to all of it.

    S is the acceptance length, new tokens by steps (2402.02057, equation 6); prompts share one sum, the prefill is not
    counted. The n-grams of the prompt are in the pool.

    Returns:
        rows of ngram, window, step_compression, nodes_per_step and steps; `fit` (of all rows, see `Fit`; None with the
        reason in `note`) and `fits` (for each N alone); distinct_4 of the texts.
    """
    pairs = [(ngram, window) for ngram in dict.fromkeys(ngrams) for window in dict.fromkeys(windows)]
    _enough(pairs)  # and all else that the fit needs, before anything is measured
    _optimize()
    makers = [drafters.factory(Lookahead, window=w, guesses=w, ngram=n) for n, w in pairs]
    _check(target, prompts, Lookahead)
    rows: list[Data] = []
    texts: list[list[int]] = []
    for number, ((ngram, window), make) in enumerate(zip(pairs, makers, strict=True)):
        stats, here = Stats(), list[list[int]]()
        for index, prompt in enumerate(prompts):
            progress(f"N = {ngram}, W = G = {window}", number * len(prompts) + index, len(pairs) * len(prompts))
            generation = _begin(target, prompt, make(), max_new_tokens, eos_token_ids)
            here.append([token for step in _steps(target, generation) for token in step.tokens])
            stats += generation.stats
        texts = texts or here
        rows.append(
            {
                "ngram": ngram,
                "window": window,
                "step_compression": round(stats.acceptance_length, 4),
                "nodes_per_step": round(stats.nodes_per_step, 2),
                "steps": stats.steps,
                "different_texts": sum(a != b for a, b in zip(here, texts, strict=True)),
            }
        )
    fits: dict[str, Data] = {}
    whole, note = _fitted(rows)
    for ngram in dict.fromkeys(ngrams):
        alone, _ = _fitted([row for row in rows if row["ngram"] == ngram])
        if alone is not None:
            fits[str(ngram)] = alone
    return {
        "figure": "compression",
        "conditions": conditions(target, max_new_tokens=max_new_tokens, temperature=0, prompts=len(prompts)),
        "tokens": sum(map(len, texts)),
        "distinct_4": round(distinct(texts), 4),
        "rows": rows,
        "fit": whole,
        "fits": fits,
        "note": note,
    }


def _fitted(rows: Sequence[Data]) -> tuple[Data | None, str]:
    try:
        return asdict(fit([(row["ngram"], row["window"], row["step_compression"]) for row in rows])), ""
    except BadParameter as error:
        return None, str(error)


# -------------------------------------------------------------------------------------------------------- jacobi


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

    A block begins as random tokens of the prompt. One iteration is one forward that replaces all its tokens by the
    target's choices after those before; it ends at the fixed point, which is the text of plain decoding, and the next
    block begins behind it. With a temperature the dice of a position stay the same over the iterations. A token is
    right where it is that of the fixed point. A block in which the text ends is left out.

    Returns:
        curves, one for each temperature: blocks; `right[k][i]`, share of blocks whose position i is right after k
        iterations (k = 0 is the start); `mean[k]`, over the positions; `settled[k]`, share of positions that are right
        with all before them, all that decoding may keep; `iterations` a block took to be right, mean and greatest; and
        `tokens_per_iteration`, their ratio (the forward that confirms the last block not counted).
    """
    if block < 2 or max_new_tokens < block:
        raise BadParameter(f"block={block} is not possible: it must be at least 2, and at most max_new_tokens")
    if CHAIN not in target.capabilities or target.max_nodes < block:
        raise Refused(f"{target.name} cannot read a block of {block} tokens in one forward")
    _check(target, prompts)
    params = [SamplingParams(temperature=temperature, seed=seed) for temperature in temperatures]
    curves = []
    for number, param in enumerate(params):
        runs: list[list[list[int]]] = []  # of each block: its tokens after 0, 1, 2, ... iterations
        for index, prompt in enumerate(prompts):
            progress(f"temperature {param.temperature:g}", number * len(prompts) + index, len(params) * len(prompts))
            runs += _blocks(target, prompt, param, block, max_new_tokens, eos_token_ids, random.Random(seed))
        if not runs:
            raise BadParameter(
                f"no text at temperature {param.temperature:g} is as long as a block of {block}; "
                "name a shorter one, or other prompts"
            )
        curves.append({"temperature": param.temperature, **_convergence(runs, block)})
    return {
        "figure": "jacobi",
        "conditions": conditions(target, max_new_tokens=max_new_tokens, prompts=len(prompts), seed=seed),
        "block": block,
        "curves": curves,
    }


def _blocks(
    target: Target,
    prompt: Tokens,
    params: SamplingParams,
    block: int,
    max_new_tokens: int,
    eos_token_ids: Tokens,
    dice: random.Random,
) -> Iterator[list[list[int]]]:
    """Each block's tokens, iteration by iteration from the start to the fixed point."""
    with closing(target.open(prompt, params, reserve=len(prompt) + max_new_tokens)) as session:
        longest = min(len(prompt) + max_new_tokens, target.context_length)
        while len(session.tokens) + block <= longest:
            values = [[dice.choice(prompt) for _ in range(block)]]
            while True:
                tree = TokenTree.chain(session.tokens[-1], values[-1][:-1])
                choices = target.step([session], [tree])[0]
                after = choices.of(range(block)).tolist()
                # Position i is right after i + 1 iterations, by induction. A target that computes otherwise is left.
                if after == values[-1] or len(values) > block + 1:
                    break
                values.append(after)
            session.commit(verify(tree, choices))
            if after != values[-1]:
                continue  # not deterministic: what was verified stands, but the block tells nothing
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


# ---------------------------------------------------------------------------------------------------------- pool


def pool(
    target: Target,
    prompts: Sequence[Tokens],
    options: dict[str, Any] | None = None,
    max_new_tokens: int = 256,
    eos_token_ids: Tokens = (),
    progress: Progress = silent,
) -> Data:
    """Size and use of lookahead's n-gram pool as greedy generation proceeds.

    Args:
        options: of the drafter `lookahead`.

    Returns:
        steps, a row for each: step (0 is the pool that the prompt filled), prompts (texts that came so far), and means
        over them of tokens (committed so far), keys, ngrams, hit (the look-up found something) and accepted (a guess
        of the pool was accepted).
        at, a row for each number of new tokens: keys, ngrams, and hit and accepted as shares of all steps up to there.
    """
    make = drafters.factory(Lookahead, **(options or {}))
    _check(target, prompts, Lookahead)
    histories = []
    for index, prompt in enumerate(prompts):
        progress("lookahead", index, len(prompts))
        drafter = make()
        assert isinstance(drafter, Lookahead)
        generation = _begin(target, prompt, drafter, max_new_tokens, eos_token_ids)
        histories.append(_pool_history(target, generation, drafter))
    first = make()
    assert isinstance(first, Lookahead)
    return {
        "figure": "pool",
        "conditions": conditions(target, max_new_tokens=max_new_tokens, temperature=0, prompts=len(prompts)),
        "lookahead": {"window": first.window, "ngram": first.ngram, "guesses": first.guesses},
        "steps": _by_step(histories),
        "at": _by_tokens(histories, max_new_tokens),
    }


History = list[dict[str, int]]  # after each step: tokens, keys, ngrams, hit, accepted


def _pool_history(target: Target, generation: Generation, drafter: Lookahead) -> History:
    grams, tokens = drafter.pool, 0
    history: History = [
        {"tokens": 0, "keys": grams.figures()["prefixes"], "ngrams": len(grams), "hit": 0, "accepted": 0}
    ]
    hits, lookups = grams.hits, grams.lookups
    for step in _steps(target, generation):
        tokens += len(step.tokens)
        looked = grams.lookups > lookups  # the last token of a text has no room for a draft
        accepted = any(step.proposal.sources[node] == "guess" for node in step.verdict.path[1:])
        if looked:
            history.append(
                {
                    "tokens": tokens,
                    "keys": grams.figures()["prefixes"],
                    "ngrams": len(grams),
                    "hit": grams.hits - hits,
                    "accepted": int(accepted),
                }
            )
        hits, lookups = grams.hits, grams.lookups
    return history


def _by_step(histories: Sequence[History]) -> list[Data]:
    rows = []
    for number in range(max(map(len, histories))):
        here = [history[number] for history in histories if number < len(history)]
        rows.append({"step": number, "prompts": len(here), **{name: _mean(here, name) for name in here[0]}})
    return rows


def _by_tokens(histories: Sequence[History], longest: int) -> list[Data]:
    rows = []
    for tokens in (*(n for n in CHECKPOINTS if n < longest), longest):
        parts = []  # of each text that came so far: its history up to there
        for history in histories:
            end = next((index for index, row in enumerate(history) if row["tokens"] >= tokens), None)
            if end is not None:
                parts.append(history[: end + 1])
        if parts:
            steps = [row for part in parts for row in part[1:]]
            ends = [part[-1] for part in parts]
            rows.append(
                {
                    "tokens": tokens,
                    "prompts": len(parts),
                    "keys": _mean(ends, "keys"),
                    "ngrams": _mean(ends, "ngrams"),
                    "hit": _mean(steps, "hit") if steps else None,
                    "accepted": _mean(steps, "accepted") if steps else None,
                }
            )
    return rows


def _mean(rows: Sequence[dict[str, int]], name: str) -> float:
    return round(sum(row[name] for row in rows) / len(rows), 4)


# --------------------------------------------------------------------------------------------------------- match


def match_length(tokens: Tokens, longest: int) -> int:
    """Length of the longest end of `tokens`, up to `longest`, that stands in it earlier too, with a token behind it."""
    best = 0
    for end in range(len(tokens) - 1, 0, -1):
        length = 0
        while length < min(longest, end) and tokens[end - 1 - length] == tokens[-1 - length]:
            length += 1
        best = max(best, length)
        if best == longest:
            break
    return best


def match(
    target: Target,
    prompts: Sequence[Tokens],
    max_ngram: int = 8,
    min_ngram: int = 1,
    num_tokens: int = 10,
    max_new_tokens: int = 128,
    eos_token_ids: Tokens = (),
    progress: Progress = silent,
) -> Data:
    """Accepted tokens of a draft by the length of the match that it follows: prompt lookup, greedy.

    Drafts that the end of the text cut short are left out.

    Returns:
        rows of match (`max_ngram` stands for all matches at least as long), drafts, `accepted` (mean tokens of a draft,
        with low and high, a bootstrap interval of 95 %, None with fewer than five drafts), first_right (share of drafts
        with an accepted token) and all_right (share accepted to the last token); steps, and how many of them had no
        match at all.
    """
    make = drafters.factory(PromptLookup, max_ngram=max_ngram, min_ngram=min_ngram, num_tokens=num_tokens)
    _check(target, prompts, PromptLookup)
    accepted: dict[int, list[int]] = defaultdict(list)
    steps = without = 0
    for index, prompt in enumerate(prompts):
        progress("prompt_lookup", index, len(prompts))
        generation = _begin(target, prompt, make(), max_new_tokens, eos_token_ids)
        before = list(prompt)
        for step in _steps(target, generation):
            steps += 1
            length = match_length(before, max_ngram)
            without += length < min_ngram
            if len(step.tree) - 1 == num_tokens:
                accepted[length].append(step.verdict.accepted)
            before += step.tokens
    rows = []
    for length, values in sorted(accepted.items()):
        low, high = _bootstrap(values)
        rows.append(
            {
                "match": length,
                "drafts": len(values),
                "accepted": {"mean": round(float(np.mean(values)), 4), "low": low, "high": high},
                "first_right": round(sum(value > 0 for value in values) / len(values), 4),
                "all_right": round(sum(value == num_tokens for value in values) / len(values), 4),
            }
        )
    return {
        "figure": "match",
        "conditions": conditions(target, max_new_tokens=max_new_tokens, temperature=0, prompts=len(prompts)),
        "max_ngram": max_ngram,
        "min_ngram": min_ngram,
        "num_tokens": num_tokens,
        "steps": steps,
        "without_match": without,
        "rows": rows,
    }


def _bootstrap(values: Sequence[int], draws: int = 2000) -> tuple[float | None, float | None]:
    """95 % interval of the mean; drafts count as independent, which those of one text are not quite."""
    if len(values) < ENOUGH:
        return None, None
    picked = np.random.default_rng(0).choice(np.array(values), size=(draws, len(values)))
    low, high = np.quantile(picked.mean(axis=1), (0.025, 0.975)).tolist()
    return round(low, 4), round(high, 4)


# ------------------------------------------------------------------------------------------------------ expected


def expected_tokens(alpha: float, length: int) -> float:
    """Tokens of one step with one draft: (1 - α^(K+1)) / (1 - α) (Leviathan et al., 2211.17192, equation 1)."""
    return (1 - alpha ** (length + 1)) / (1 - alpha)


def expected_speedup(alpha: float, length: int, cost: float) -> float:
    """Wall-clock gain over plain decoding: expected tokens / (1 + c K) (2211.17192, theorem 3.8).

    The target's step over K + 1 tokens is taken to cost what its step over one costs.
    """
    return expected_tokens(alpha, length) / (1 + cost * length)


def expected(alphas: Sequence[float], length: int = 5, cost: float = 0.05, longest: int = 16) -> Data:
    """The expected-tokens calculator.

    Args:
        alphas: acceptance rates, 0 < alpha < 1: the probability that a drafted token is right if all before it are.
        length: K, drafted tokens of a step.
        cost: c, time of drafting one token, in steps of the target.
        longest: K where the curves end.

    Returns:
        rows, one for each alpha: tokens and speedup at K; best_length and best_speedup (None without a cost: longer is
        then always better); curves of tokens and speedup over K = 0..longest.
    """
    for alpha in alphas:
        if not 0 < alpha < 1:
            raise BadParameter(f"alpha={alpha:g} is not possible: an acceptance rate lies between 0 and 1")
    if not alphas or length < 0 or longest < 1 or not 0 <= cost < math.inf:
        raise BadParameter(f"K={length} and c={cost:g} must be at least 0, and there must be an alpha and a K to draw")
    longest = max(longest, length)
    rows = []
    for alpha in dict.fromkeys(alphas):
        speedups = [expected_speedup(alpha, k, cost) for k in range(LONGEST)]
        best = int(np.argmax(speedups)) if cost > 0 else None
        rows.append(
            {
                "alpha": alpha,
                "tokens": round(expected_tokens(alpha, length), 4),
                "speedup": round(expected_speedup(alpha, length, cost), 4),
                "best_length": best,
                "best_speedup": None if best is None else round(speedups[best], 4),
                "curve": {
                    "length": list(range(longest + 1)),
                    "tokens": [round(expected_tokens(alpha, k), 4) for k in range(longest + 1)],
                    "speedup": [round(expected_speedup(alpha, k, cost), 4) for k in range(longest + 1)],
                },
            }
        )
    return {"figure": "expected", "conditions": conditions(), "length": length, "cost": cost, "rows": rows}


# ---------------------------------------------------------------------------------------------------- generations


def _check(target: Target, prompts: Sequence[Tokens], drafter: type[Drafter] | None = None) -> None:
    if not prompts:
        raise BadParameter("there are no prompts to measure on")
    if drafter is not None:
        require(target, drafter.needs, drafter.name)


def _begin(target: Target, prompt: Tokens, drafter: Drafter, length: int, eos_token_ids: Tokens) -> Generation:
    stop = StopParams(max_new_tokens=length, eos_token_ids=tuple(eos_token_ids))
    stopper, stats = Stopper(stop, prompt, target.context_length), Stats()
    session = target.open(prompt, GREEDY, stats, len(prompt) + length)
    return Generation(session, drafter, stopper, stats)


def _steps(target: Target, generation: Generation) -> Iterator[Step]:
    with closing(decode(target, [generation])) as loop:
        for _, step in loop:
            yield step
