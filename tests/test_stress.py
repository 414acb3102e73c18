"""Eight threads with fifty requests each on one `LLM`, with cancels and callbacks that raise, on both engines."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from leapahead import LLM

THREADS, REQUESTS = 8, 50
PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3, 5], [8, 9, 7, 9, 3] * 4, [2, 3, 8], [4, 6, 2, 6, 4, 3, 3], [8, 3, 2, 7, 9]]
OPTIONS: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True}


def transformers(folder: Path) -> LLM:
    return LLM(str(folder), max_batch=4, dtype="float32")


def llama_cpp(folder: Path) -> LLM:
    import gguf_models

    return LLM(str(gguf_models.llama()), max_batch=4, n_threads=1)


def cache_is_free(target: Any) -> bool:
    """Whether no session holds cache rows, or sequence ids, of which all sessions have an equal share."""
    if hasattr(target, "executor"):
        return not any(row.busy for row in target.executor.cache.rows)
    return bool(target.max_leaves == target.context.n_seq_max)


def failing(tokens: Any) -> bool:
    raise RuntimeError("the user's criterion failed")


def work(llm: LLM, expected: dict[tuple[int, float], list[int]], thread: int) -> int:
    rng, compared = random.Random(thread), 0
    for _ in range(REQUESTS):
        index, temperature = rng.randrange(len(PROMPTS)), rng.choice([0.0, 1.0])
        options = {**OPTIONS, "temperature": temperature, "seed": index}
        options["drafter"] = rng.choice(["auto", "lookahead", "recycling", "suffix", "prompt_lookup", "plain"])
        text = expected[index, temperature]
        fate = rng.choice(["whole", "whole", "stream", "cancel", "fail"])
        if fate == "whole":
            assert llm.generate(PROMPTS[index], **options).tokens == text
            compared += 1
        elif fate == "fail":
            with pytest.raises(RuntimeError, match="criterion failed"):
                llm.generate(PROMPTS[index], criteria=[failing], **options)
        else:
            stream, tokens = llm.stream(PROMPTS[index], **options), list[int]()
            for piece in stream:
                tokens += piece.tokens
                if fate == "cancel" and rng.random() < 0.3:
                    break
            stream.close()
            assert tokens == text[: len(tokens)]
            assert fate == "cancel" or tokens == text
            compared += 1
    return compared


@pytest.mark.slow
@pytest.mark.parametrize("make", [transformers, llama_cpp])
def test_threads_on_one_llm(make: Any, tiny_folder: Path) -> None:
    """Every text that survives is its text alone, and all cache rows are free at the end."""
    llm = make(tiny_folder)
    expected = {
        (index, temperature): llm.generate(
            prompt, drafter="plain", temperature=temperature, seed=index, **OPTIONS
        ).tokens
        for index, prompt in enumerate(PROMPTS)
        for temperature in (0.0, 1.0)
    }
    with ThreadPoolExecutor(THREADS) as pool:
        assert sum(pool.map(partial(work, llm, expected), range(THREADS))) > THREADS * REQUESTS / 2
    assert cache_is_free(llm.target)
