"""What `python -m research devices` measures: times of forwards, and which guesses are right in texts of a model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from statistics import median
from time import perf_counter

import torch

from leapahead import Engine, Request, StopParams
from leapahead.bench.conditions import Progress, Tokens
from leapahead.core.errors import BadParameter, Refused
from leapahead.core.sampling import SamplingParams
from leapahead.core.tree import TokenTree
from leapahead.models.base import PROMPT_ROWS, Capture, Target, read_prompt
from leapahead.models.self_draft.early_exit import EarlyExit
from leapahead.models.transformers.model import TransformersTarget
from leapahead.planner.draft import Step as Seen
from leapahead.planner.measurement import fitted, rounds
from research.devices.schedules import Step, fitted_line

GREEDY = SamplingParams()
CONTEXT = 64  # tokens before a forward of a part of the layers that is timed
REPEATS = 15
Text = tuple[list[int], int]  # a prompt with its text, and the number of tokens of the prompt


def texts(target: Target, prompts: Sequence[Tokens], max_new_tokens: int, ends: Tokens) -> list[Text]:
    """Each prompt with the text of plain decoding, of which at least two tokens are new.

    Raises:
        BadParameter: there is no such text.
    """
    engine = Engine(target)
    drafter = engine.drafter("plain")
    stop = StopParams(max_new_tokens=max_new_tokens, eos_token_ids=tuple(ends))
    handles = [engine.submit(Request(list(prompt), drafter, GREEDY, stop)) for prompt in prompts]
    engine.run(handles)
    pairs = zip(prompts, handles, strict=True)
    found = [([*prompt, *handle.tokens], len(prompt)) for prompt, handle in pairs if len(handle.tokens) > 1]
    if not found:
        raise BadParameter("no prompt has a text of two tokens; give other prompts, or raise --max-new-tokens")
    return found


def ranks(guesser: Target, pairs: Sequence[Text], k: int) -> list[list[int]]:
    """For every new token of each text, its rank among the guesser's k likeliest after the tokens before it; k if none.

    The guesser reads the whole text at once. Of long texts the last `PROMPT_ROWS` tokens are looked at.
    """
    found = []
    for tokens, given in pairs:
        with guesser.lock, closing(guesser.open(tokens, GREEDY, Capture(top_k=k))) as session:
            rows = read_prompt(guesser, session, chunk=len(tokens))[-1]
            best, _ = rows.top_k(k)
            first = max(rows.top_k_start, given - 1)
            some = best[first - rows.top_k_start :]
        following = tokens[first + 1 : first + 1 + len(some)]
        assert len(tokens) - given <= PROMPT_ROWS
        here = []
        for row, token in zip(some.tolist(), following, strict=True):
            here.append(row.index(token) if token in row else k)
        found.append(here)
    return found


def exits(target: Target, pairs: Sequence[Text], k: int, progress: Progress) -> dict[int, list[list[int]]]:
    """Layers -> the ranks at an early exit behind so many layers: the final norm and the output layer of the model.

    Raises:
        Refused: the target is no model of Transformers, or its layers cannot be left out.
    """
    model = transformers_target(target)
    found = {}
    for number in range(1, model.info.layers):
        progress(f"early exit after {number} layers", number, model.info.layers)
        found[number] = ranks(EarlyExit(model, number), pairs, k)
    return found


def transformers_target(target: Target) -> TransformersTarget:
    """The target, if it is a model of Transformers."""
    if not isinstance(target, TransformersTarget):
        raise Refused(f"{target.info.name} has no early exits; give a model of Transformers")
    return target


def recorded(
    target: Target, prompts: Sequence[Tokens], sizes: tuple[int, int, int], max_new_tokens: int, ends: Tokens
) -> list[list[Step]]:
    """The steps of lookahead decoding, text by text.

    Args:
        sizes: W, N and G.
    """
    window, ngram, guesses = sizes
    engine = Engine(target)
    drafter = engine.drafter("lookahead", window=window, ngram=ngram, guesses=guesses)
    stop = StopParams(max_new_tokens=max_new_tokens, eos_token_ids=tuple(ends))
    found = []
    for prompt in prompts:
        seen: list[Seen] = []
        engine.run([engine.submit(Request(list(prompt), drafter, GREEDY, stop, on_step=seen.append))])
        found.append([Step(tuple(each.tree.parent_list), each.verdict.path) for each in seen])
    return found


def curve(target: Target, sizes: Sequence[int], seconds: float) -> dict[int, float]:
    """Rows -> seconds of a forward, as `leapahead tune` measures them."""
    return fitted(rounds(target, sizes=sizes, seconds=seconds))


def layer_times(target: Target) -> tuple[float, float]:
    """Seconds of one layer and of what is computed beside the layers (embedding, final norm, output layer).

    The line through the times of one-row forwards that end behind some of the layers, medians of interleaved rounds.

    Raises:
        Refused: the target is no model of Transformers, or has too few layers for that.
    """
    model = transformers_target(target)
    count = model.info.layers
    some = sorted({1, count // 4, count // 2, 3 * count // 4, count - 1} - {0})
    if len(some) < 2:
        raise Refused(f"{model.info.name} has {count} layers, and three are needed to time one; give another model")
    parts: dict[int, Target] = {number: EarlyExit(model, number) for number in some}
    took: dict[int, list[float]] = {number: [] for number in parts}
    sessions = {}
    for number, part in parts.items():
        tokens = [int(token) for token in model.ordinary_ids()[:CONTEXT]]
        sessions[number] = part.open(tokens, GREEDY)
        read_prompt(part, sessions[number])
    for _ in range(REPEATS):
        for number, part in parts.items():
            session = sessions[number]
            began = perf_counter()
            _ = part.step([session], [TokenTree.root(session.tokens[-1])])[0][0]
            took[number].append(perf_counter() - began)
    for session in sessions.values():
        session.close()
    head, layer = fitted_line([(float(number), median(each)) for number, each in took.items()])
    return max(layer, 0.0), max(head, 0.0)


def threads() -> int:
    """Threads of torch."""
    return torch.get_num_threads()
