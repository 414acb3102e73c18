"""Trained heads: what they compute with caches, trees and batches, what they refuse, and that no text changes."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import heads
import numpy as np
import pytest
import torch
from helpers import FixedLatency, mostly_slow
from safetensors import SafetensorError

from leapahead import LLM, Request
from leapahead.core.errors import BadParameter, LeapaheadError, Refused
from leapahead.drafters.heads import cache, checkpoint, formats, load, networks
from leapahead.drafters.heads.config import HeadConfig
from leapahead.drafters.heads.head import Head
from leapahead.drafters.heads.row_head import RowHead, RowText
from leapahead.drafters.sources.head import HeadSource
from leapahead.training.features import training_target

pytestmark = pytest.mark.filterwarnings("ignore:the head")  # which may take as long as the tiny model

KINDS = tuple(heads.LAYERS)
SLOW = pytest.mark.slow
FAST = ("eagle3", "hydra++", "dflash")  # both classes of heads, and a layer before the heads
PROMPTS = ["def add(a, b):\n    return a + b\n\ndef add(", "for number in range(10): print(", "The quick"]


def vocabulary(model: Any) -> int:
    return int(model.config.vocab_size)


def decoded(model: Any, tokenizer: Any, folder: Path, drafter: str = "auto", **options: Any) -> tuple[list[Any], Head]:
    """The texts of all prompts, drafted with a head, and the head."""
    temperature = options.pop("temperature", 0.0)
    llm = LLM(model, tokenizer=tokenizer, drafter=drafter, head=str(folder), **options)
    found = llm.generate(PROMPTS, max_new_tokens=16, temperature=temperature, seed=5, ignore_eos=True)
    return found, head_of(llm, folder)


def head_of(llm: LLM, folder: Path) -> Head:
    (model,) = llm.engine.drafter("head", head=str(folder)).draft_forwards.models
    return model.head


def worst(found: list[heads.Computed], model: Any, head: Head, kind: str, ids: np.ndarray | None = None) -> float:
    ids = np.arange(vocabulary(model)) if ids is None else ids
    return heads.worst(found, model, head.module, heads.LAYERS[kind], ids)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=SLOW), 1.0])
def test_candidates_are_those_of_a_full_recomputation(
    kind: str, temperature: float, exact_model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = heads.write(tmp_path / kind, kind, vocabulary(exact_model))
    found = heads.recording(monkeypatch)
    decoded(exact_model, tokenizer, folder, "head", depth=3, nodes=12, temperature=temperature)
    texts, head = decoded(exact_model, tokenizer, folder, nodes=40, temperature=temperature)
    plain = LLM(exact_model, tokenizer=tokenizer, drafter="plain").generate(
        PROMPTS, max_new_tokens=16, temperature=temperature, seed=5, ignore_eos=True
    )
    assert [text.tokens for text in texts] == [text.tokens for text in plain]
    assert max(text.stats.accepted for text in texts) > 4  # entries of drafts were dropped and written anew
    assert max(len(each.path) for each in found) >= 2
    assert worst(found, exact_model, head, kind) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "sizes"), [("eagle3", {1, 2, 4, 8, 16, 128}), ("peagle", {1, 128}), ("dflash", {1, 128}), ("medusa", {1})]
)
def test_what_reading_a_prompt_takes_is_measured(
    kind: str, sizes: set[int], tiny_model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every third round: both halves of the rounds have it. Medusa reads no prompt."""
    folder = heads.write(tmp_path, kind, vocabulary(tiny_model))
    with LLM(tiny_model, tokenizer=tokenizer, drafter="head", head=str(folder)) as llm:
        head, found = head_of(llm, folder), list[list[dict[int, float]]]()
        monkeypatch.setattr(head.latency, "use", found.append)
        head.measure()
    (rounds,) = found
    assert set().union(*rounds) == sizes
    assert [turn for turn, each in enumerate(rounds) if 128 in each] == ([1, 4, 7, 10] if 128 in sizes else [])


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "norms_heads"])
def test_variants_of_eagle3(
    variant: str, exact_model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = heads.write(tmp_path, "eagle3", vocabulary(exact_model), **{variant: True})
    found = heads.recording(monkeypatch)
    _, head = decoded(exact_model, tokenizer, folder, "head", nodes=12)
    assert getattr(head.config, variant)
    assert worst(found, exact_model, head, "eagle3") < 1e-6


def test_eagle3_of_qwen3_layers_is_computed_by_its_formulas() -> None:
    """With states that are normed each alone, and outputs that are normed before the next row reads them (3.1)."""
    tensors = heads.tensors_of("eagle3", 40, fc_norm=True, norms_heads=True)
    given = heads.config_of("eagle3", 40, norm_output=True)
    decoder = {**given["transformer_layer_config"], "model_type": "qwen3", "num_hidden_layers": 1}
    tensors = {name: each for name, each in tensors.items() if not name.startswith("layers.1.")}
    shapes = {name: tuple(each.shape) for name, each in tensors.items()}
    config = formats.parse({**given, "transformer_layer_config": decoder}, shapes, "a head")
    module: Any = networks.make(config)
    module.load_state_dict(tensors)
    states, tokens = torch.randn(1, 3, 96, generator=torch.Generator().manual_seed(2)), torch.tensor([[4, 9, 2]])
    with torch.no_grad():
        found = module(tokens, module.fuse(states), torch.arange(3)[None], heads.causal)
        logits = module.logits(found)

    def norm(x: Any, name: str) -> Any:
        return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * tensors[f"{name}.weight"]

    def turned(x: Any) -> Any:  # rotary positions of [rows, heads, 8]
        angles = torch.arange(3)[:, None, None] / 10000.0 ** (torch.arange(4) / 4)
        first, second = x.chunk(2, dim=-1)
        return torch.cat(
            (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), dim=-1
        )

    at = "layers.0"
    fused = torch.cat([norm(each, f"fc_norm.{k}") for k, each in enumerate(states[0].chunk(3, -1))], -1)
    fused = fused @ tensors["fc.weight"].T
    x = norm(tensors["embed_tokens.weight"][tokens[0]], f"{at}.input_layernorm")
    x = torch.cat((x, norm(fused, f"{at}.hidden_norm")), dim=-1)
    q, k, v = ((x @ tensors[f"{at}.self_attn.{name}_proj.weight"].T).view(3, -1, 8) for name in "qkv")
    q, k = turned(norm(q, f"{at}.self_attn.q_norm")), turned(norm(k, f"{at}.self_attn.k_norm"))
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / 8**0.5
    scores = scores.masked_fill(~torch.ones(3, 3, dtype=torch.bool).tril(), -torch.inf)
    x = (
        fused
        + torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1) @ tensors[f"{at}.self_attn.o_proj.weight"].T
    )
    h = norm(x, f"{at}.post_attention_layernorm")
    gate, up, down = (tensors[f"{at}.mlp.{name}_proj.weight"].T for name in ("gate", "up", "down"))
    x = norm(x + (torch.nn.functional.silu(h @ gate) * (h @ up)) @ down, "norm")
    torch.testing.assert_close(found[0], x, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits[0], x @ tensors["lm_head.weight"].T, atol=1e-3, rtol=1e-4)


def test_a_full_disk_leaves_no_half_of_a_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(tensors: Any, file: Path) -> None:
        file.touch()
        raise SafetensorError("No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(BadParameter, match=r"the head cannot be written to .*: No space left on device"):
        checkpoint.write(tmp_path, {}, {})
    assert list(tmp_path.iterdir()) == []


def test_peagle_in_its_own_form(tmp_path: Path) -> None:
    """As AWS publishes it: EAGLE-3's configuration with `ptd_token_id`, and the masks' state as a vector."""
    tensors = heads.tensors_of("peagle", 40)
    tensors["mask_hidden"] = tensors["mask_hidden"].flatten()
    given = {**heads.config_of("peagle", 40)["transformer_layer_config"], "draft_vocab_size": 40, "ptd_token_id": 39}
    checkpoint.write(tmp_path, given, tensors)
    config, named = checkpoint.read(tmp_path)
    assert (config.kind, config.mask_token, config.depths, config.layers) == ("peagle", 39, 8, ())
    module: Any = networks.make(config)
    module.load_state_dict(named)
    assert torch.equal(module.mask_hidden[0, 0], tensors["mask_hidden"])
    checkpoint.write(tmp_path, {**given, "ptd_token_id": None}, tensors)
    with pytest.raises(BadParameter, match="is no usable head"):
        checkpoint.read(tmp_path)


@pytest.mark.parametrize(
    ("nested", "top", "layers"),
    [
        ([0, 1, 2], None, (1, 2, 3)),  # the outputs of layers from 0
        ([1, 2, 3], None, (2, 3, 4)),
        ([2, 4, 8], None, (2, 4, 8)),  # numbered like the default ones
        ([1, 2, 3], [1, 2, 3], (1, 2, 3)),
        (None, None, (2, 4, 5)),
    ],
)
def test_eagle3_names_its_layers_in_either_place(
    nested: Any, top: Any, layers: tuple[int, ...], tmp_path: Path
) -> None:
    """SpecForge writes them into "eagle_config"."""
    given = {**heads.config_of("eagle3", 40)["transformer_layer_config"], "draft_vocab_size": 40}
    given |= {"eagle_config": nested and {"eagle_aux_hidden_state_layer_ids": nested, "use_aux_hidden_state": True}}
    given |= {"eagle_aux_hidden_state_layer_ids": top}
    checkpoint.write(tmp_path, given, heads.tensors_of("eagle3", 40))
    config, _ = checkpoint.read(tmp_path)
    assert (config.kind, config.target_hidden_size, config.layers_of(8)) == ("eagle3", 32, layers)


@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
def test_sliding_attention_of_eagle_and_impossible_masks_are_refused(
    kind: str, tiny_model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    size = vocabulary(tiny_model)
    given = heads.config_of(kind, size)
    decoder = {**given["transformer_layer_config"], "layer_types": ["sliding_attention"], "sliding_window": 9}
    checkpoint.write(tmp_path / "a", {**given, "transformer_layer_config": decoder}, heads.tensors_of(kind, size))
    assert "'sliding_attention', which are not supported in EAGLE" in refused(
        Refused, tiny_model, tokenizer, tmp_path / "a"
    )
    if kind == "peagle":
        checkpoint.write(tmp_path / "b", {**given, "mask_token_id": size}, heads.tensors_of(kind, size))
        assert f"mask_token_id={size} and speculative_tokens=4" in refused(
            BadParameter, tiny_model, tokenizer, tmp_path / "b"
        )


@pytest.mark.slow
def test_a_head_may_know_a_part_of_the_vocabulary(
    exact_model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = heads.write(tmp_path, "eagle3", vocabulary(exact_model), drafted=100)
    found = heads.recording(monkeypatch)
    _, head = decoded(exact_model, tokenizer, folder, "head", nodes=12)
    assert worst(found, exact_model, head, "eagle3", 2 * np.arange(100)) < 1e-6
    assert all(token % 2 == 0 for each in found for token in each.candidates)


def shifted(monkeypatch: pytest.MonkeyPatch) -> None:
    append = RowText.append
    monkeypatch.setattr(RowText, "append", lambda self, states: append(self, states.roll(1, 0)))


def stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of drafted nodes stay in the cache instead of being computed from the target's states."""

    def append(self: RowText, states: Any) -> None:
        kept = min(len(states) - 1, len(self.nodes))
        self.known += len(states)
        self.length += kept
        self._waiting.append(states[kept:])

    monkeypatch.setattr(RowText, "append", append)


def wrong_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HeadConfig, "layers_of", lambda self, count: (0, 2, 1))


def twice_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HeadSource, "target_ids", lambda self, ids: np.minimum(4 * ids, 198))


@pytest.mark.slow
@pytest.mark.parametrize("mutation", [shifted, stale, wrong_layers, twice_mapped])
def test_the_usual_mistakes_are_found(
    mutation: Callable[[pytest.MonkeyPatch], None],
    exact_model: Any,
    tokenizer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = heads.write(tmp_path, "eagle3", vocabulary(exact_model), drafted=100)
    found = heads.recording(monkeypatch)
    mutation(monkeypatch)
    _, head = decoded(exact_model, tokenizer, folder, nodes=40)
    assert worst(found, exact_model, head, "eagle3", 2 * np.arange(100)) > 1e-3


@pytest.mark.slow
def test_states_before_the_final_norm_are_found(
    exact_model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = heads.write(tmp_path, "eagle", vocabulary(exact_model))
    found = heads.recording(monkeypatch)
    monkeypatch.setattr(HeadConfig, "layers_of", lambda self, count: (count - 1,))
    _, head = decoded(exact_model, tokenizer, folder, "head", nodes=12)
    assert worst(found, exact_model, head, "eagle") > 1e-3


OPTIONS: dict[str, dict[str, Any]] = {
    "nodes": {"nodes": 6},
    "depth": {"depth": 3},
    "chain": {"nodes": 4, "chain": True},
    "unaware": {"seed_aware": False, "nodes": 6},
    "planned": {},
}
EVERY = [(kind, name) for kind in KINDS for name in OPTIONS]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), EVERY)
@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=SLOW), 0.8])
def test_no_text_changes(
    kind: str, name: str, temperature: float, tiny_model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    folder, options = heads.write(tmp_path, kind, vocabulary(tiny_model)), OPTIONS[name]
    given: dict[str, Any] = {"max_new_tokens": 20, "temperature": temperature, "seed": 3, "n": 2}
    with LLM(tiny_model, tokenizer=tokenizer, drafter="plain") as llm:
        plain = llm.generate(PROMPTS, **given)
    with LLM(tiny_model, tokenizer=tokenizer, drafter="head", head=str(folder), max_batch=4, **options) as llm:
        found = llm.generate(PROMPTS, **given)
        (one,) = llm.generate(PROMPTS[0], **{**given, "n": 1})
    assert [[text.tokens for text in some] for some in found] == [[text.tokens for text in some] for some in plain]
    assert one.tokens == plain[0][0].tokens
    assert any(text.stats.drafted for some in found for text in some) or "nodes" not in options


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAST)
def test_a_head_drafts_outside_of_inference_mode_what_was_begun_in_it(
    kind: str, tiny_model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    folder = heads.write(tmp_path, kind, vocabulary(tiny_model))
    with LLM(tiny_model, tokenizer=tokenizer, drafter="head", head=str(folder), nodes=6) as llm:
        with torch.inference_mode():
            stream = llm.stream(PROMPTS[0], max_new_tokens=20)
            tokens = list(next(stream).tokens)
        tokens += [token for piece in stream for token in piece.tokens]
        assert tokens == llm.generate(PROMPTS[0], max_new_tokens=20, drafter="plain").tokens


def test_long_prompts_are_read_in_chunks(
    exact_model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = heads.write(tmp_path, "eagle3", vocabulary(exact_model))
    monkeypatch.setattr("leapahead.drafters.sources.head.CHUNK", 7)
    found = heads.recording(monkeypatch)
    _, head = decoded(exact_model, tokenizer, folder, "head", nodes=6, prefill_chunk=5)
    assert found
    assert worst(found, exact_model, head, "eagle3") < 1e-6


@pytest.mark.parametrize("method", mostly_slow(["read", "forward", "as_states", "keep"], "read"))
def test_a_full_memory_ends_the_drafts_of_a_head_and_no_text(
    method: str, tiny_model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    folder = heads.write(tmp_path, "eagle3", vocabulary(tiny_model))
    monkeypatch.setattr("leapahead.drafters.sources.head.CHUNK", 7)
    llm = LLM(tiny_model, tokenizer=tokenizer, drafter="head", head=str(folder), nodes=6)
    plain = llm.generate(PROMPTS[0], max_new_tokens=12, drafter="plain")
    monkeypatch.setattr(RowHead, method, full)
    found = llm.generate(PROMPTS[0], max_new_tokens=12)
    assert found.tokens == plain.tokens
    assert found.stats.drafter["eagle3"]["stopped"] == "CUDA out of memory"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_beginning_of_a_prompt_is_not_read_again(
    kind: str, exact_model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target takes from its cache no more than the head has rows of, and the head computes the rest."""
    folder = heads.write(tmp_path, kind, vocabulary(exact_model))
    found = heads.recording(monkeypatch)
    llm = LLM(exact_model, tokenizer=tokenizer, drafter="head", head=str(folder), nodes=6, drafter_cache=False)
    first = llm.generate(PROMPTS[0], max_new_tokens=12, ignore_eos=True)
    tokens = first.prompt_tokens + first.tokens
    following = [*tokens[:-3], 50, 51, 52, 53]
    plain = LLM(exact_model, tokenizer=tokenizer, drafter="plain").generate(following, max_new_tokens=12)
    again = llm.generate(following, max_new_tokens=12)
    assert again.tokens == plain.tokens
    assert again.stats.reused_tokens >= len(tokens) - 6
    handles = llm.engine.submit(request_of(llm, following, owner="somebody else"))
    llm.engine.run([handles])
    assert handles.stats.reused_tokens == 0
    assert worst(found, exact_model, head_of(llm, folder), kind) < 1e-6


def test_a_text_of_more_rows_than_are_kept_is_not_read_again(
    exact_model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "KEPT_ROWS", 8)
    folder = heads.write(tmp_path, "eagle3", vocabulary(exact_model))
    found = heads.recording(monkeypatch)
    llm = LLM(exact_model, tokenizer=tokenizer, drafter="head", head=str(folder), nodes=6, drafter_cache=False)
    first = llm.generate(PROMPTS[0], max_new_tokens=12, ignore_eos=True)
    tokens = first.prompt_tokens + first.tokens
    again = llm.generate(tokens, max_new_tokens=12, ignore_eos=True)
    assert again.stats.reused_tokens >= len(tokens) - 6
    assert worst(found, exact_model, head_of(llm, folder), "eagle3") < 1e-6


@pytest.mark.parametrize(("seconds", "stopped"), [(10.0, "it is slower than the target"), (0.9, None)])
def test_prompts_are_not_read_again_for_a_head_that_does_not_draft(
    seconds: float, stopped: str | None, exact_model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """One that is slower than the target, or does not pay. What it has not read, it reads when it does."""
    folder = heads.write(tmp_path, "eagle3", vocabulary(exact_model))
    found = heads.recording(monkeypatch)
    llm = LLM(exact_model, tokenizer=tokenizer, drafter="head", head=folder, drafter_cache=False)
    head: Any = head_of(llm, folder)
    head.prepare = head.measure = lambda: None
    plain = llm.engine.latency = FixedLatency(llm.target, {1: 1.0, 16: 1.1})
    llm.engine._drafters.host = llm.drafter.host = replace(llm.drafter.host, latency=plain)
    head.latency = FixedLatency(llm.target, {1: seconds})
    first, again = (llm.generate(PROMPTS[0], max_new_tokens=8, ignore_eos=True) for _ in range(2))
    figures = again.stats.drafter["eagle3"]
    assert (figures["forwards"], figures.get("stopped")) == (0, stopped)
    assert again.tokens == first.tokens
    assert first.stats.reused_tokens == 0
    assert again.stats.reused_tokens >= len(first.prompt_tokens) - 2
    head.latency = FixedLatency(llm.target, {1: 0.01})
    later = llm.generate(PROMPTS[0], max_new_tokens=48, ignore_eos=True)
    assert later.stats.reused_tokens >= len(first.prompt_tokens) - 2
    assert (later.stats.drafter["eagle3"]["forwards"] > 0) == (stopped is None)
    assert worst(found, exact_model, head, "eagle3") < 1e-6


def test_a_head_keeps_nothing_of_the_weights_that_its_target_had(
    exact_model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, folder = deepcopy(exact_model), heads.write(tmp_path, "eagle3", vocabulary(exact_model))
    llm = LLM(model, tokenizer=tokenizer, drafter="head", head=str(folder), nodes=6, drafter_cache=False)
    llm.generate(PROMPTS[0], max_new_tokens=12, ignore_eos=True)
    model.load_state_dict({name: each + 0.1 for name, each in model.state_dict().items()})
    found = heads.recording(monkeypatch)
    reused = [llm.generate(PROMPTS[0], max_new_tokens=12, ignore_eos=True).stats.reused_tokens for _ in range(2)]
    assert reused[0] == 0 < reused[1]
    assert found
    assert worst(found, model, head_of(llm, folder), "eagle3") < 1e-6


def test_an_interrupted_forward_leaves_no_rows_for_later_prompts(
    exact_model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    folder = heads.write(tmp_path, "eagle3", vocabulary(exact_model))
    found = heads.recording(monkeypatch)
    llm = LLM(exact_model, tokenizer=tokenizer, drafter="head", head=str(folder), nodes=6, drafter_cache=False)
    head: Any = head_of(llm, folder)
    with monkeypatch.context() as patch:
        patch.setattr(RowHead, "_computed", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS[0], max_new_tokens=12)
    assert not head._kept
    llm.generate(PROMPTS[0], max_new_tokens=12)
    assert found
    assert worst(found, exact_model, head, "eagle3") < 1e-6


def request_of(llm: LLM, tokens: list[int], owner: str) -> Request:
    ((request, _),) = llm.requests([tokens], {"max_new_tokens": 12, "seed": 1})
    return replace(request, owner=owner)


def test_several_heads_draft_together(tiny_model: Any, tokenizer: Any, tmp_path: Path) -> None:
    folders = [heads.write(tmp_path / kind, kind, vocabulary(tiny_model)) for kind in ("eagle", "medusa", "eagle3")]
    text = LLM(tiny_model, tokenizer=tokenizer, drafter="plain").generate(PROMPTS[0], max_new_tokens=24).text
    llm = LLM(tiny_model, tokenizer=tokenizer, head=[*folders, folders[0]], nodes=40)
    found = llm.generate(PROMPTS[0], max_new_tokens=24)
    assert found.text == text
    assert {"eagle", "eagle2", "medusa", "eagle3"} <= found.stats.drafter.keys()


def test_the_folder_of_a_head_may_be_in_the_home_folder(
    tiny_model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    heads.write(tmp_path / "head", "medusa", vocabulary(tiny_model))
    assert LLM(tiny_model, tokenizer=tokenizer, head="~/head").generate(PROMPTS[0], max_new_tokens=2).tokens


def test_a_request_may_name_the_head_drafter(tiny_model: Any, tokenizer: Any, tmp_path: Path) -> None:
    llm = LLM(tiny_model, tokenizer=tokenizer, head=heads.write(tmp_path, "medusa", vocabulary(tiny_model)))
    found = llm.generate(PROMPTS[0], max_new_tokens=12, drafter="head", drafter_options={"nodes": 5})
    assert set(found.stats.drafted_by) == {"medusa"}


def test_forwards_are_run_where_they_pay(tiny_model: Any, tokenizer: Any, tmp_path: Path) -> None:
    """A head that predicts well and costs little is used; one that costs as much as the target is not, and says so."""
    folder = heads.write(tmp_path, "medusa", vocabulary(tiny_model))
    for seconds, is_used in ((1e-6, True), (10.0, False)):
        llm = LLM(tiny_model, tokenizer=tokenizer, drafter="head", head=folder)
        head = head_of(llm, folder)
        head.latency = FixedLatency(llm.target, {1: seconds})
        head.prepare = lambda: None  # type: ignore[method-assign]
        if is_used:
            assert llm.generate(PROMPTS[0], max_new_tokens=24).stats.drafter["medusa"]["forwards"] > 0
        else:
            with pytest.warns(UserWarning, match="the head .* takes 10000.0 ms"):
                assert llm.generate(PROMPTS[0], max_new_tokens=8).stats.drafted == 0


def test_reading_the_prompt_is_charged_to_all_tokens_that_may_follow(
    tiny_model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    """A head is used whose forwards cost little, although its first one, with the prompt, costs more than a step."""
    llm = LLM(
        tiny_model, tokenizer=tokenizer, drafter="head", head=heads.write(tmp_path, "eagle3", vocabulary(tiny_model))
    )
    head = head_of(llm, tmp_path)
    head.prepare = lambda: None  # type: ignore[method-assign]
    prompt = list(range(5, 45))
    plain = llm.engine.latency = FixedLatency(llm.target, {1: 1.0, 16: 1.1})
    llm.engine._drafters.host = llm.drafter.host = replace(llm.drafter.host, latency=plain)
    head.latency = FixedLatency(llm.target, {1: 0.01, 4: 0.02, 40: 5.0})
    assert llm.generate(prompt, max_new_tokens=48, ignore_eos=True).stats.drafter["eagle3"]["forwards"] > 0


# ------------------------------------------------------------------------------------------------------ checkpoints


def refused(error: type[LeapaheadError], model: Any, tokenizer: Any, folder: Path | str) -> str:
    with pytest.raises(error) as found:
        LLM(model, tokenizer=tokenizer, drafter="head", head=str(folder))
    assert "\n" not in str(found.value)
    return str(found.value)


@pytest.mark.parametrize("head", ["own", ["own"], "own,other"])
def test_a_head_is_found_where_the_working_directory_has_changed(
    head: Any, tiny_model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("own", "other"):
        heads.write(tmp_path / name, "eagle3", vocabulary(tiny_model))
    monkeypatch.chdir(tmp_path)
    with LLM(tiny_model, tokenizer=tokenizer, head=head) as llm:
        monkeypatch.chdir("/")
        llm.generate(PROMPTS[0], drafter="head", max_new_tokens=2)


def test_heads_of_other_targets_are_refused(tiny_model: Any, tokenizer: Any, tmp_path: Path) -> None:
    size = vocabulary(tiny_model)
    assert f"a vocabulary of {size + 1}" in refused(
        BadParameter, tiny_model, tokenizer, heads.write(tmp_path / "a", "eagle3", size + 1)
    )
    config = heads.config_of("eagle3", size, eagle_aux_hidden_state_layer_ids=[2, 5, 9])
    checkpoint.write(tmp_path / "b", config, heads.tensors_of("eagle3", size))
    message = refused(BadParameter, tiny_model, tokenizer, tmp_path / "b")
    assert "layers 2, 5, 9, and the target has 2 layers" in message
    for layers, expected in (([-99, 1, 2], "layers -99, 1, 2, and the target has 2"), ([1, 1, 2], "is named twice")):
        config = heads.config_of("eagle3", size, eagle_aux_hidden_state_layer_ids=layers)
        checkpoint.write(tmp_path / "b", config, heads.tensors_of("eagle3", size))
        assert expected in refused(BadParameter, tiny_model, tokenizer, tmp_path / "b")
    narrow = {
        name: tensor[:, :80] if name == "fc.weight" else tensor
        for name, tensor in heads.tensors_of("eagle3", size).items()
    }
    checkpoint.write(tmp_path / "c", heads.config_of("eagle3", size), narrow)
    assert "hidden states of width" in refused(BadParameter, tiny_model, tokenizer, tmp_path / "c")
    checkpoint.write(
        tmp_path / "d",
        heads.config_of("eagle3", size, speculators_config={"verifier": {"name_or_path": "meta/other"}}),
        narrow,
    )
    assert "it was trained for meta/other" in refused(BadParameter, tiny_model, tokenizer, tmp_path / "d")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "it has no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "cannot be read"),
        (lambda folder: (folder / "config.json").write_text("[]"), "expected an object"),
        (lambda folder: (folder / "config.json").write_text("{}"), "lack what is needed"),
        (lambda folder: (folder / "model.safetensors").unlink(), "has no weights"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"broken"), "not a readable safetensors file"),
    ],
)
def test_broken_heads_are_refused(
    change: Callable[[Path], Any], message: str, tiny_model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    change(heads.write(tmp_path, "eagle3", vocabulary(tiny_model)))
    assert message in refused(BadParameter, tiny_model, tokenizer, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_missing_misshapen_and_unknown_tensors_are_refused(
    kind: str, tiny_model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    size = vocabulary(tiny_model)
    name = heads.A_TENSOR[kind]
    for change, error, message in (
        (lambda found: found.pop(name), BadParameter, f"lacks the tensor {name}"),
        (lambda found: found.update({name: found[name][:-1]}), BadParameter, f"has {name} of shape"),
        (lambda found: found.update({"markov.weight": found[name].clone()}), Refused, "has the tensor markov.weight"),
    ):
        tensors = heads.tensors_of(kind, size)
        change(tensors)
        folder = tmp_path / message.replace(" ", "-")
        checkpoint.write(folder, heads.config_of(kind, size), tensors)
        assert message in refused(error, tiny_model, tokenizer, folder)


def test_other_kinds_and_wrong_mappings_are_refused(tiny_model: Any, tokenizer: Any, tmp_path: Path) -> None:
    size = vocabulary(tiny_model)
    tensors = heads.tensors_of("eagle3", size, drafted=100)
    for kind in ("xpress", "eagle"):  # the latter is supported in EAGLE's own format
        checkpoint.write(tmp_path / "a", heads.config_of("eagle3", size, speculators_model_type=kind), tensors)
        message = refused(Refused, tiny_model, tokenizer, tmp_path / "a")
        assert f"of kind {kind!r} in the format of speculators, which" in message
        assert message.endswith("are medusa, eagle3, peagle, dflash, dflash2, dspark, mtp")
    tensors["d2t"] = torch.full((100,), size)
    checkpoint.write(tmp_path / "b", heads.config_of("eagle3", size), tensors)
    assert "the file is broken" in refused(BadParameter, tiny_model, tokenizer, tmp_path / "b")
    config = heads.config_of("eagle3", size)
    config["transformer_layer_config"]["model_type"] = "mamba"
    checkpoint.write(tmp_path / "c", config, heads.tensors_of("eagle3", size))
    assert "decoder layers of type 'mamba'" in refused(Refused, tiny_model, tokenizer, tmp_path / "c")
    assert "there is no head at" in refused(BadParameter, tiny_model, tokenizer, tmp_path / "nowhere")
    with pytest.raises(BadParameter, match="needs head="):
        LLM(tiny_model, tokenizer=tokenizer, drafter="head")
    with pytest.raises(BadParameter, match="names no trained head"):
        LLM(tiny_model, tokenizer=tokenizer, drafter="head", head=",")


@pytest.mark.parametrize(
    ("kind", "mapping", "value"),
    [
        ("eagle3", "d2t", torch.zeros(100, 1, dtype=torch.long)),
        ("eagle3", "d2t", torch.full((100,), 0.5)),
        ("eagle3", "d2t", torch.zeros(0, dtype=torch.long)),
        ("medusa", "token_map", torch.zeros(100, 1, dtype=torch.long)),
        ("medusa", "token_map", torch.zeros(100)),
    ],
)
def test_a_mapping_that_is_none_is_refused(
    kind: str, mapping: str, value: Any, tiny_model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    size = vocabulary(tiny_model)
    tensors = {**heads.tensors_of(kind, size, drafted=100), mapping: value}
    checkpoint.write(tmp_path, heads.config_of(kind, size), tensors)
    message = refused(BadParameter, tiny_model, tokenizer, tmp_path)
    assert f"has {mapping} of shape {list(value.shape)}" in message
    assert "where one whole number for each of its tokens was expected" in message


def test_a_part_of_the_vocabulary_needs_its_mapping(tiny_model: Any, tokenizer: Any, tmp_path: Path) -> None:
    size = vocabulary(tiny_model)
    tensors = heads.tensors_of("eagle3", size, drafted=100)
    del tensors["d2t"]
    checkpoint.write(tmp_path, heads.config_of("eagle3", size), tensors)
    message = refused(BadParameter, tiny_model, tokenizer, tmp_path)
    assert f"lacks the tensor d2t, which tells the 100 of {size} tokens that it can propose" in message


def test_a_target_without_hidden_states_is_refused(tmp_path: Path) -> None:
    from leapahead.models.toy import ToyTarget

    with pytest.raises(Refused, match=r"needs hidden from the target.*; leave out the head, or load a model of Transf"):
        LLM(ToyTarget(), head=str(heads.write(tmp_path, "medusa", 8)))


def test_what_a_gguf_file_and_exact_mode_do_not_give(tiny_model: Any, tokenizer: Any, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    import gguf_models

    with pytest.raises(Refused, match=r"layers 0, 1, 2, and .* gives those of the last one only"):
        LLM(gguf_models.llama(), head=str(heads.write(tmp_path / "gguf", "eagle3", 4096)))
    head = heads.write(tmp_path / "exact", "eagle3", vocabulary(tiny_model))
    with pytest.raises(Refused, match=r"which .* does not have in exact mode"):
        LLM(tiny_model, tokenizer=tokenizer, head=str(head), exact=True)


class Spy:
    """An object whose unpickling runs code."""

    def __reduce__(self) -> Any:
        return open, ("executed", "w")


def test_pickles_are_converted_and_never_loaded(
    tiny_model: Any, tokenizer: Any, tmp_path: Path, leapahead: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    size = vocabulary(tiny_model)
    source = tmp_path / "published"
    source.mkdir()
    tensors = heads.tensors_of("eagle3", size, drafted=100)
    published = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    published["t2d"] = torch.zeros(size, dtype=torch.bool)
    config = heads.config_of("eagle3", size)
    (source / "config.json").write_text(json.dumps(config))
    torch.save(published, source / "pytorch_model.bin")
    assert "leapahead convert-head" in refused(Refused, tiny_model, tokenizer, source)
    result = leapahead("convert-head", str(source), "converted")
    assert result.exit_code == 0, result.output
    assert "eagle3" in result.stdout
    assert LLM(tiny_model, tokenizer=tokenizer, drafter="head", head="converted").generate("def", max_new_tokens=4)
    result = leapahead("convert-head", str(source), "converted")
    assert (result.exit_code, "is not empty" in result.stderr) == (2, True)
    (source / "pytorch_model.bin").write_bytes(pickle.dumps(Spy()))
    result = leapahead("convert-head", str(source), "other")
    assert (result.exit_code, "holds more than tensors" in result.stderr) == (2, True)
    assert not Path("executed").exists()
    for broken in (torch.zeros(3), [tensors], {1: torch.zeros(3)}):
        torch.save(broken, source / "pytorch_model.bin")
        result = leapahead("convert-head", str(source), "other")
        assert (result.exit_code, "holds no tensors by their names" in result.stderr) == (2, True)
    torch.save({"state_dict": tensors}, source / "pytorch_model.bin")
    assert "no pickled weights, which are" in leapahead("convert-head", str(source), "other").stderr
    monkeypatch.setitem(sys.modules, "torch", None)
    result = leapahead("convert-head", str(source), "other")
    assert result.stderr.startswith("error: a trained head needs torch, which is not installed: pip install")


def pickled(folder: Path) -> Path:
    """A head whose weights are a pickle."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(heads.config_of("eagle3", 320)))
    torch.save(heads.tensors_of("eagle3", 320, drafted=100), folder / "pytorch_model.bin")
    return folder


def test_an_interrupted_conversion_can_be_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(tensors: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    source, there = pickled(tmp_path / "pickled"), tmp_path / "there"
    there.mkdir()
    for destination in (tmp_path / "converted", there):
        with monkeypatch.context() as patched:
            patched.setattr("safetensors.torch.save_file", interrupted)
            with pytest.raises(KeyboardInterrupt):
                checkpoint.convert(source, destination)
        assert destination.exists() == (destination == there)
        assert checkpoint.convert(source, destination).kind == "eagle3"
        assert {each.name for each in destination.iterdir()} == {"config.json", "model.safetensors"}


def test_the_state_of_a_training_is_not_taken_for_weights(tmp_path: Path) -> None:
    source = pickled(tmp_path / "pickled")
    for name in ("training_args.bin", "optimizer.bin", "scheduler.pt", "rng_state_0.pth"):
        (source / name).write_bytes(pickle.dumps(Spy()))
    assert checkpoint.convert(source, tmp_path / "converted").kind == "eagle3"
    (source / "pytorch_model.bin").unlink()
    with pytest.raises(BadParameter, match="has no pickled weights"):
        checkpoint.convert(source, tmp_path / "other")
    with pytest.raises(BadParameter, match=r"has no weights: expected model\.safetensors"):
        checkpoint.read(source)


def test_published_medusa_weights(tiny_model: Any, tokenizer: Any, tmp_path: Path) -> None:
    """Medusa's own form, whose file says two heads where there are three."""
    size = vocabulary(tiny_model)
    random = torch.Generator().manual_seed(0)
    published = {}
    for k in range(3):
        published[f"{k}.0.linear.weight"] = torch.randn(32, 32, generator=random)
        published[f"{k}.0.linear.bias"] = torch.randn(32, generator=random)
        published[f"{k}.1.weight"] = torch.randn(size, 32, generator=random)
    source = tmp_path / "medusa"
    source.mkdir()
    (source / "config.json").write_text(json.dumps({"medusa_num_heads": 2, "base_model_name_or_path": "tiny"}))
    torch.save(published, source / "medusa_lm_head.pt")
    described = checkpoint.convert(source, tmp_path / "converted")
    assert (described.depths, described.blocks, described.bias, described.target) == (3, 1, True, "tiny")
    config, tensors = checkpoint.read(tmp_path / "converted")
    module = networks.make(config)
    module.load_state_dict(tensors)
    x = torch.randn(32, generator=random)
    residual = x + torch.nn.functional.silu(published["2.0.linear.weight"] @ x + published["2.0.linear.bias"])
    torch.testing.assert_close(module.one(2, x), published["2.1.weight"] @ residual)
    assert LLM(tiny_model, tokenizer=tokenizer, head=str(tmp_path / "converted")).generate("def", max_new_tokens=4)


def test_medusa_with_the_targets_output_layer(tiny_model: Any, tokenizer: Any, tmp_path: Path) -> None:
    """The default of speculators: no lm_heads in the file."""
    size = vocabulary(tiny_model)
    blocks = {name: tensor for name, tensor in heads.tensors_of("medusa", size).items() if name.startswith("blocks")}
    config = {"speculators_model_type": "medusa", "num_heads": 3, "medusa_vocab_size": size, "original_lm_head": True}
    checkpoint.write(tmp_path, config, blocks)
    llm = LLM(tiny_model, tokenizer=tokenizer, drafter="head", head=tmp_path, nodes=5)
    module = head_of(llm, tmp_path).module
    assert torch.equal(module.lm_heads[0].weight, tiny_model.lm_head.weight)
    x = torch.randn(2, 32)
    assert torch.equal(module(x)[:, 2], tiny_model.lm_head(module.blocks[2](x)))
    assert llm.generate(PROMPTS[0], max_new_tokens=8).stats.drafted


def test_a_reduced_medusa_vocabulary(tiny_model: Any, tokenizer: Any, tmp_path: Path) -> None:
    """vLLM's form: token_map holds the target's ids."""
    size = vocabulary(tiny_model)
    ids = torch.arange(100) * 3
    tensors = {**heads.tensors_of("medusa", size, drafted=100), "token_map": ids}
    checkpoint.write(tmp_path, heads.config_of("medusa", size, truncated_vocab_size=100), tensors)
    llm = LLM(tiny_model, tokenizer=tokenizer, drafter="head", head=tmp_path, nodes=5)
    assert np.array_equal(head_of(llm, tmp_path).target_ids(np.arange(100)), ids.numpy())
    assert llm.generate(PROMPTS[0], max_new_tokens=8).stats.drafted


def test_eagle_uses_the_layers_of_its_target(tiny_model: Any, tokenizer: Any, tmp_path: Path) -> None:
    llm = LLM(
        tiny_model, tokenizer=tokenizer, drafter="head", head=heads.write(tmp_path, "eagle", vocabulary(tiny_model))
    )
    module = head_of(llm, tmp_path).module
    assert torch.equal(module.lm_head.weight, tiny_model.lm_head.weight)
    assert module.embed_tokens.weight.data_ptr() == tiny_model.model.embed_tokens.weight.data_ptr()  # not a copy


def test_layers_of_a_target_are_copied_to_the_device_of_the_head(tiny_model: Any, tmp_path: Path) -> None:
    """Of a target on several devices, the output layer lies on the last one. The device of the test is meta."""
    config, tensors = checkpoint.read(heads.write(tmp_path, "eagle", vocabulary(tiny_model)))
    with LLM(tiny_model) as llm:
        target = SimpleNamespace(info=llm.target.info, model=tiny_model, device="meta")
    module = load.load(config, tensors, target, "it").module
    assert {each.device.type for each in module.parameters()} == {"meta"}


def test_an_output_layer_that_is_offloaded_is_refused(tiny_model: Any, tokenizer: Any, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = deepcopy(tiny_model)
    accelerate.disk_offload(model.lm_head, str(tmp_path / "offloaded"), torch.device("cpu"))
    folder = heads.write(tmp_path / "head", "eagle", vocabulary(tiny_model))
    assert "shows none, as where it is offloaded; load the target" in refused(Refused, model, tokenizer, folder)
    with LLM(model) as llm, pytest.raises(Refused, match=r"no head can be trained for .* lie on cpu and meta, since"):
        training_target(llm.target)


SHORT = "--max-new-tokens 8 --head HEAD"


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        f"generate x {SHORT}",
        f"generate x {SHORT} -d head -o nodes=4 -t 1 --seed 1",
        f"explain x {SHORT} --terminal -d head -o nodes=4",
        f"check -d head -d auto -o nodes=6 --limit 2 --batch 2 {SHORT}",
        "bench --quick -d plain --config head:head=HEAD,nodes=4 --max-new-tokens 6 --out bench",
    ],
)
def test_commands_take_a_head(
    command: str, leapahead: Any, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    size = json.loads((tiny_folder / "config.json").read_text())["vocab_size"]
    folder = heads.write(tmp_path / "head", "eagle3", size)
    result = leapahead(*command.replace("HEAD", str(folder)).split())
    assert result.exit_code == 0, result.output


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_bundled_head(temperature: float) -> None:
    prompt = 'def add(a, b):\n    """Return the sum of a and b."""\n'
    with LLM(dtype="float32", drafter="head", head="bundled", nodes=16) as llm:
        given: dict[str, Any] = {"max_new_tokens": 64, "temperature": temperature, "seed": 2}
        found = llm.generate(prompt, **given)
        assert found.tokens == llm.generate(prompt, drafter="plain", **given).tokens
    assert found.stats.acceptance_length > 1.4
