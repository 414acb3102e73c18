"""Exact mode of GGUF files: a token's logits are the same bits with every draft, batch and schedule."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from leapahead.core.errors import BadParameter, Refused
from leapahead.core.sampling import SamplingParams
from leapahead.core.tree import TokenTree

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")

import llama_cpp
from gguf_architectures import BY_NAME, VOCABULARY
from gguf_models import bundled
from helpers import mostly_slow

from leapahead import Engine, Request
from leapahead.core.stop import StopParams
from leapahead.drafters.plain import Plain
from leapahead.models import loading
from leapahead.models.base import TREE
from leapahead.models.llama_cpp import exact as exact_mode
from leapahead.models.llama_cpp.exact import CHUNK, STEP_ROWS, ExactLlamaCppTarget
from leapahead.models.llama_cpp.model import LlamaCppTarget
from tests.helpers import GREEDY
from tests.test_exact import assert_samples_are_those_of_each_alone, differing, prompts_of, texts

FAST = ("llama", "mixtral", "gemma3", "gpt2", "deepseek2")
OTHERS = tuple(name for name, each in BY_NAME.items() if not each.stateful and name not in FAST)
SAMPLED = SamplingParams(temperature=0.8, seed=3)


def load(path: Path, **options: Any) -> Any:
    return loading.load(path, exact=True, **{"n_threads": 1, "n_ctx": 512, **options}).target


@cache
def target_of(kind: str) -> Any:
    return load(bundled(kind))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FAST, *OTHERS])
def test_bits_of_each_family(name: str) -> None:
    """Windows, experts, learned positions and latent keys among them; three sequences in turns."""
    target = load(BY_NAME[name].path(), n_ctx=256, n_seq_max=3)
    assert target.info.exact
    assert target.info.context_length == (192 if name == "gpt2" else 256)
    assert differing(target, prompts_of((5, 60, 118), VOCABULARY - 1), batch=3) == 0


@pytest.mark.parametrize("kind", mostly_slow(["bf16", "q8_0", "q4_k_m"], "q8_0"))
def test_bits_of_each_type(kind: str) -> None:
    """Behind the 256 cells at which llama.cpp reads more of its cache, too."""
    target = target_of(kind)
    assert differing(target, prompts_of((9, 245), 4000), batch=2) == 0
    assert differing(target, prompts_of((63,), 4000), params=SAMPLED) == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["f32", "bf16", "q8_0", "q4_k_m"])
def test_bits_of_long_texts(kind: str) -> None:
    target = load(bundled(kind), n_ctx=2048, n_seq_max=4)
    for lengths in ((10, 70, 124, 300), (1200, 130, 63, 64)):
        for params in (GREEDY, SAMPLED):
            assert differing(target, prompts_of(lengths, 4000), batch=4, new=60, params=params) == 0


@pytest.mark.slow
def test_cells_of_a_text_are_not_taken_over_as_those_of_a_prompt() -> None:
    target = target_of("bf16")
    (first,) = prompts_of((100,), 4000)
    longer = [*first, *texts(target, Plain, [first], new=60)[0][0], 5, 6, 7]
    engine = Engine(target)
    handle = engine.submit(Request(longer, engine.drafter(Plain), stop=StopParams(max_new_tokens=1)))
    engine.run([handle])
    assert handle.stats.reused_tokens == CHUNK  # a whole chunk of the first prompt, and nothing of its text
    again = texts(target, Plain, [longer])
    target.forget()
    assert texts(target, Plain, [longer]) == again


@pytest.mark.slow
def test_samples_of_one_prompt_have_the_text_of_each_alone() -> None:
    assert_samples_are_those_of_each_alone(load(bundled("bf16"), n_seq_max=2), prompts_of((70,), 4000)[0])


def test_what_is_not_exact_is_refused() -> None:
    for options, why in (
        ({"flash_attn": True}, "it divides the cells among threads"),
        ({"n_gpu_layers": 4}, "which uses the CPU"),
        ({"n_ubatch": 32}, "whose forwards have up to 64 tokens"),
    ):
        with pytest.raises(BadParameter, match=f"not possible in exact mode.*{why}"):
            load(bundled("bf16"), **options)
    with pytest.raises(Refused, match=r"cannot be decoded in exact mode \(it has recurrent layers\)"):
        load(BY_NAME["mamba"].path())
    target = target_of("bf16")
    session = target.open([1], GREEDY)
    with pytest.raises(
        BadParameter, match="a step of 9 rows is more than the 8 that one may have; give shorter drafts"
    ):
        target.step([session], [TokenTree.chain(1, range(2, 10))])
    with pytest.raises(BadParameter, match="with branches is not possible in exact mode"):
        target.step([session], [TokenTree([1, 2, 3], [-1, 0, 0])])
    with pytest.raises(Refused, match=r"needs tree from the target, which .* does not have in exact mode; use"):
        Engine(target).drafter("lookahead")
    session.close()


# ----------------------------------------------------------------------------------------------------- mutations


def test_mutation_rows_that_are_not_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ExactLlamaCppTarget, "_forward", LlamaCppTarget._forward)
    with pytest.raises(Refused, match="not those of plain decoding bit for bit with this build"):
        load(bundled("q8_0"))


@pytest.mark.slow
def test_mutation_sequences_that_share_the_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other sequences' cells lie between those of a sequence, at other places than when it is alone."""
    whole = exact_mode.Context
    monkeypatch.setattr(exact_mode, "Context", lambda model, options, beyond: whole(model, options))
    target = load(bundled("bf16"), n_seq_max=3)
    assert differing(target, prompts_of((20, 60, 100), 4000), batch=3, new=40) > 0


def test_mutation_branches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node whose cell is not at its position."""
    target = target_of("bf16")
    monkeypatch.setattr(ExactLlamaCppTarget, "max_leaves", 4)
    monkeypatch.setattr(target, "info", replace(target.info, capabilities=target.info.capabilities | {TREE}))
    with pytest.raises(BadParameter, match="with branches is not possible in exact mode"):
        differing(target, prompts_of((20,), 4000))
    assert target_of("bf16").max_nodes == STEP_ROWS


def test_nothing_goes_to_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp's own choice is to put all layers there."""
    asked, own = list[int](), llama_cpp.llama_model_load_from_file

    def loaded(path: bytes, params: Any) -> Any:
        asked.append(params.n_gpu_layers)
        return own(path, params)

    monkeypatch.setattr(llama_cpp, "llama_model_load_from_file", loaded)
    loading.load(bundled("f32"), exact=True, n_ctx=256)
    assert asked == [0]
