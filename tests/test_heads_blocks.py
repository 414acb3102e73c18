"""Hydra, DFlash, DFlash 2 and DSpark: their published formats, their networks, the usual mistakes, what they refuse."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import heads
import numpy as np
import pytest
import torch
from torch.nn import functional as F

from leapahead import LLM
from leapahead.core.errors import BadParameter, LeapaheadError, Refused
from leapahead.drafters.heads import checkpoint, dflash2, dflash_head, formats, networks
from leapahead.drafters.heads.cache import CachedText, Span
from leapahead.drafters.heads.config import DFlashConfig, HeadConfig
from leapahead.drafters.heads.dflash import DFlash
from leapahead.drafters.heads.dflash2 import Selector
from leapahead.drafters.heads.dflash_head import DFlashText
from leapahead.models.choices import Rows

pytestmark = pytest.mark.filterwarnings("ignore:the head")  # which may take as long as the tiny model

PROMPTS = ["def add(a, b):\n    return a + b\n\ndef add(", "for number in range(10): print(", "The quick"]


def vocabulary(model: Any) -> int:
    return int(model.config.vocab_size)


def errors(folder: Path, kind: str, model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> float:
    """How far the candidates during decoding are from the recomputed ones."""
    found = heads.recording(monkeypatch)
    with LLM(model, tokenizer=tokenizer, head=str(folder), nodes=40) as llm:
        llm.generate(PROMPTS, max_new_tokens=16, ignore_eos=True)
        drafter: Any = llm.engine.drafter("head", head=str(folder))
        (model_of,) = drafter.draft_forwards.models
        ids = torch.arange(vocabulary(model)).numpy()
        assert found
        return heads.worst(found, model, model_of.head.module, heads.LAYERS[kind], ids)


# ------------------------------------------------------------------------------------------------- usual mistakes


def shifted(monkeypatch: pytest.MonkeyPatch) -> None:
    append = CachedText.append
    monkeypatch.setattr(CachedText, "append", lambda self, states: append(self, states.roll(1, 0)))


def stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of blocks stay in the cache instead of being computed from the target's states."""

    def append(self: Any, states: Any) -> None:
        kept = min(len(states) - 1, self.depths if self.length else 0)
        self.known += len(states)
        self.length += kept
        self._waiting.append(states[kept:])
        self.is_computed = False

    monkeypatch.setattr(DFlashText, "append", append)


def wrong_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HeadConfig, "layers_of", lambda self, count: (0, 2))


def wrong_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DFlash, "predicting", lambda self, states: states[..., : self.config.depths, :])


def causal_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    span = Span
    monkeypatch.setattr(
        dflash_head,
        "Span",
        lambda text, begin, rows, mask: span(
            text, begin, rows, torch.ones(rows, begin + rows, dtype=torch.bool).tril(begin)
        ),
    )


def old_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of the committed tokens begin at position 0 in every forward."""
    context = DFlash.context
    monkeypatch.setattr(DFlash, "context", lambda self, states, at: context(self, states, at - at.min()))


def between_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first row of a block reads the last row of the one before it."""
    pad = F.pad

    def wrapped(x: Any, sizes: Any) -> Any:
        return x.flatten(1, 2).roll(1, 1).view(x.shape) if len(sizes) == 6 else pad(x, sizes)

    monkeypatch.setattr(dflash2.F, "pad", wrapped)


def after_the_anchor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The candidates of every depth are scored after the last committed token."""
    scores = Selector.scores
    monkeypatch.setattr(
        Selector,
        "scores",
        lambda self, logits, tokens, states, before: scores(
            self, logits, tokens, states, before[:, :1].expand_as(before) if before.ndim == 3 else before
        ),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "mutation"),
    [
        *(("dflash", each) for each in (shifted, stale, wrong_layers, wrong_rows, causal_blocks, old_positions)),
        ("hydra++", shifted),
        *(("dflash2", each) for each in (shifted, between_blocks, after_the_anchor)),
        ("dspark", shifted),
    ],
)
def test_the_usual_mistakes_are_found(
    kind: str,
    mutation: Callable[[pytest.MonkeyPatch], None],
    exact_model: Any,
    tokenizer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = heads.write(tmp_path, kind, vocabulary(exact_model))
    mutation(monkeypatch)
    if mutation in (wrong_rows, old_positions):  # which the recomputation would make too
        monkeypatch.setattr(heads, "of_block", plain_block)
    assert errors(folder, kind, exact_model, tokenizer, monkeypatch) > 1e-3


# --------------------------------------------------------------------------------------------------- the networks


def norm(x: Any, weight: Any) -> Any:
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def turned(x: Any, positions: Any) -> Any:
    """Rotary positions of [rows, heads, dim]."""
    half = x.shape[-1] // 2
    angles = positions[:, None] / 10000.0 ** (torch.arange(half, dtype=x.dtype) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat((x[..., :half] * cos - x[..., half:] * sin, x[..., half:] * cos + x[..., :half] * sin), dim=-1)


def plain_block(module: DFlash, states: torch.Tensor, tokens: Any, path: Any) -> torch.Tensor:
    """The logits after a path by DFlash's formulas, with nothing of the module but its weights."""
    w = dict(module.named_parameters())
    config, last = module.config, len(tokens) - 1
    rows = config.depths + (not config.from_anchor)
    fused = norm(states[0] @ w["fc.weight"].T, w["hidden_norm.weight"])
    x = w["embed_tokens.weight"][[tokens[-1], *[config.mask_token] * (rows - 1)]]
    places = torch.arange(last + rows, dtype=x.dtype)
    is_second = config.kind == "dflash2"
    for layer in range(2):
        at = f"layers.{layer}."
        h = norm(x, w[f"{at}input_layernorm.weight"])
        if is_second:
            h, kernel = around(w, f"{at}attention_conv", h)
        own = {}
        for name, read in (("q", h), ("k", torch.cat((fused, h))), ("v", torch.cat((fused, h)))):
            own[name] = (read @ w[f"{at}self_attn.{name}_proj.weight"].T).view(len(read), -1, 8)
        q = turned(norm(own["q"], w[f"{at}self_attn.q_norm.weight"]), places[last:])
        k = turned(norm(own["k"], w[f"{at}self_attn.k_norm.weight"]), places)
        k, v = (each.repeat_interleave(2, dim=1) for each in (k, own["v"]))
        scores = torch.einsum("qhd,khd->hqk", q, k) / 8**0.5
        scores = scores.masked_fill(~heads.visible(config, layer, rows, last), -torch.inf)
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1) @ w[f"{at}self_attn.o_proj.weight"].T
        x = x + (convolved(attended, kernel) if is_second else attended)
        h = norm(x, w[f"{at}post_attention_layernorm.weight"])
        if is_second:
            h, kernel = around(w, f"{at}mlp_conv", h)
        gated = F.silu(h @ w[f"{at}mlp.gate_proj.weight"].T) * (h @ w[f"{at}mlp.up_proj.weight"].T)
        gated = gated @ w[f"{at}mlp.down_proj.weight"].T
        x = x + (convolved(gated, kernel) if is_second else gated)
    row = norm(x, w["norm.weight"])[len(path) + rows - config.depths]
    found: torch.Tensor = row @ w["lm_head.weight"].T
    return selected(w, found, row, [*tokens, *path][-1]) if is_second else found


def around(w: Any, name: str, h: Any) -> tuple[Any, Any]:
    """What a sublayer of DFlash 2 reads, and the kernel behind it: [rows, taps, size]."""
    change = (h @ w[f"{name}.kernel_projection.weight"].T).view(len(h), 2, 2, 2).repeat_interleave(16, dim=-1)
    kernels = w[f"{name}.base_kernel"] + change
    return convolved(h, kernels[:, 0]), kernels[:, 1]


def convolved(x: Any, kernel: Any) -> Any:
    return torch.stack([kernel[i, 0] * x[i] + (kernel[i, 1] * x[i - 1] if i else 0) for i in range(len(x))])


def selected(w: Any, logits: Any, state: Any, before: int) -> torch.Tensor:
    """The five likeliest tokens, scored after the one before, share the probability that they have together."""
    context = w["candidate_selector.predecessor_codebook"][before] * (
        w["candidate_selector.hidden_projection.weight"] @ state
    )
    scores = logits + w["candidate_selector.successor_codebook"] @ context
    chosen = logits.argsort()[-5:]
    found = logits.clone()
    found[chosen] = scores[chosen].log_softmax(-1) + logits.softmax(-1)[chosen].sum().log() + logits.logsumexp(-1)
    return found


SLIDING = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 5, "use_sliding_window": True}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "decoder", "free"),
    [("dflash", {}, False), ("dflash2", {}, True), ("dflash", SLIDING, True), ("dflash", SLIDING, False)],
)
def test_a_block_is_computed_by_its_formulas(
    kind: str,
    decoder: dict[str, Any],
    free: bool,
    exact_model: Any,
    tokenizer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size = vocabulary(exact_model)
    config = in_decoder(heads.config_of(kind, size, sliding_window_non_causal=free), **decoder)
    checkpoint.write(tmp_path, config, heads.tensors_of(kind, size))
    read = checkpoint.read(tmp_path)[0]
    assert (read.sliding, read.window, read.sliding_causal) == (((1,), 5, not free) if decoder else ((), 0, False))
    monkeypatch.setattr(heads, "of_block", plain_block)
    assert errors(tmp_path, kind, exact_model, tokenizer, monkeypatch) < 1e-4  # norms are computed in float32


def test_dspark_adds_a_bias_of_the_token_before(tmp_path: Path) -> None:
    config = heads.config_of("dspark", 40, markov_head_type="gated")
    tensors = heads.tensors_of("dspark", 40)
    random = torch.Generator().manual_seed(7)
    tensors |= {"markov_head.gate_proj.weight": torch.randn(6, 38, generator=random)}
    tensors |= {"markov_head.gate_proj.bias": torch.randn(6, generator=random)}
    checkpoint.write(tmp_path, config, tensors)
    described, named = checkpoint.read(tmp_path)
    assert (described.depths, described.from_anchor, described.markov, described.markov_rank) == (4, True, "gated", 6)
    assert not any("confidence" in name for name in named)
    module: Any = networks.make(described)
    module.load_state_dict(named, strict=False)
    state, token = torch.randn(32, generator=random), torch.tensor(11)
    w1 = named["markov_head.markov_w1.weight"][11]
    gate = named["markov_head.gate_proj.weight"] @ torch.cat((state, w1)) + named["markov_head.gate_proj.bias"]
    expected = module.lm_head(state) + named["markov_head.markov_w2.weight"] @ (gate.sigmoid() * w1)
    torch.testing.assert_close(module.one(state, token), expected)


@pytest.mark.parametrize("depths", [1, 4])
@pytest.mark.parametrize("is_mapped", [False, True])
def test_dspark_waits_for_the_device_once(is_mapped: bool, depths: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the tokens of all depths, those that are followed at each of which are the likeliest of the depth before."""
    head: Any = object.__new__(dflash_head.DFlashHead)
    random = torch.Generator().manual_seed(0)
    bias = torch.randn(60, 30, generator=random)  # of a token of the target's vocabulary
    head.config = SimpleNamespace(depths=depths)
    head.module = SimpleNamespace(after=lambda logits, states, tokens: logits + bias[tokens])
    head.device, head._ids = torch.device("cpu"), np.arange(30) * 2 + 1 if is_mapped else None
    logits, last = torch.randn(depths, 30, generator=random), torch.tensor(5)
    expected, rows = [(0,)], [logits[:1] + bias[5]]
    scores = rows[0].log_softmax(-1)
    for depth in range(1, depths):
        values, some = scores.amax(0).topk(dflash_head.FOLLOWED)
        tokens = head.target_ids(some.numpy())
        expected += [(depth, token) for token in tokens.tolist()]
        rows.append(logits[depth] + bias[torch.from_numpy(tokens)])
        scores = values[:, None] + rows[-1].log_softmax(-1)
    reads, own = list[tuple[int, ...]](), torch.Tensor.tolist

    def tolist(self: torch.Tensor) -> Any:
        reads.append(tuple(self.shape))
        return own(self)

    with monkeypatch.context() as patch:
        for name in ("cpu", "numpy"):
            patch.setattr(torch.Tensor, name, None)  # calling it would fail
        patch.setattr(torch.Tensor, "tolist", tolist)
        found = head._chained(logits, torch.zeros(depths, 3), last)
    assert reads == ([(depths - 1, dflash_head.FOLLOWED)] if depths > 1 else [])
    assert found.keys == expected
    np.testing.assert_array_equal(found.rows.top_k(30)[0], Rows(torch.cat(rows)).top_k(30)[0])


def test_a_new_hydra_reads_the_tokens_of_its_path(tmp_path: Path) -> None:
    config, tensors = checkpoint.read(heads.write(tmp_path, "hydra", 40))
    module: Any = networks.make(config)
    assert not module.has_attention
    random = torch.Generator().manual_seed(3)
    module.load_state_dict({**tensors, "embed_tokens.weight": (e := torch.randn(40, 32, generator=random))})
    h, tokens = torch.randn(32, generator=random), [5, 7, 9]
    x = torch.cat((h, *(e[token] for token in tokens)))
    for layer in range(2):
        name = f"blocks.2.{layer}"
        kept = tensors[f"{name}.residual.weight"] @ x + tensors[f"{name}.residual.bias"] if layer == 0 else x
        x = kept + F.silu(tensors[f"{name}.linear.weight"] @ x + tensors[f"{name}.linear.bias"])
    expected = tensors["lm_heads.2.weight"] @ x + tensors["lm_heads.2.bias"]
    torch.testing.assert_close(module.one(2, h, torch.tensor(tokens)), expected)


# ------------------------------------------------------------------------------------------------------ the files


def published_hydra(prefixed: bool, size: int) -> dict[str, torch.Tensor]:
    """As `torch.save` of Hydra's heads: of two, whose second layer is there twice, with dropout between the layers."""
    random = torch.Generator().manual_seed(1)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random) * 0.3

    found: dict[str, torch.Tensor] = {"input_embed_fn.weight": matrix(size, 32)}
    for k in range(2):
        shared = {"weight": matrix(32, 32), "bias": matrix(32)}
        places = (1, 3, 5) if prefixed else (0, 1, 2)
        for part in ("linear", "res_connection"):
            found[f"hydra_mlp.{k}.{places[0]}.{part}.weight"] = matrix(32, 32 * (k + 2))
            found[f"hydra_mlp.{k}.{places[0]}.{part}.bias"] = matrix(32)
        for place in places[1:]:
            found |= {f"hydra_mlp.{k}.{place}.linear.{name}": each for name, each in shared.items()}
        output = f"hydra_lm_head.{k}.1" if prefixed else f"hydra_lm_head.{k}"
        found |= {f"{output}.weight": matrix(size, 32), f"{output}.bias": matrix(size)}
    if prefixed:
        prefix = "prefix_embeding_layer."
        for name, out, into in (("q", 32, 32), ("k", 16, 32), ("v", 16, 32), ("o", 32, 32)):
            found[f"{prefix}layers.0.self_attn.{name}_proj.weight"] = matrix(out, into)
        for name, out, into in (("gate", 64, 32), ("up", 64, 32), ("down", 32, 64)):
            found[f"{prefix}layers.0.mlp.{name}_proj.weight"] = matrix(out, into)
        for name in ("norm", "layers.0.input_layernorm", "layers.0.post_attention_layernorm"):
            found[f"{prefix}{name}.weight"] = matrix(32)
        found[f"{prefix}embed_tokens.weight"] = matrix(size, 32)
        found[f"{prefix}layers.0.self_attn.rotary_emb.inv_freq"] = matrix(4)
    return found


@pytest.mark.parametrize("prefixed", [False, True])
def test_published_hydra_weights(
    prefixed: bool, exact_model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decoder layer of Hydra++ has the target's shape, which its file does not tell."""
    source, kind = tmp_path / "published", "hydra++" if prefixed else "hydra"
    source.mkdir()
    weights = published_hydra(prefixed, vocabulary(exact_model))
    architecture = "prefix-mlp" if prefixed else "mlp"
    config = {"hydra_num_heads": 2, "hydra_num_layers": 3, "hydra_head_arch": architecture, "grounded_heads": True}
    (source / "config.json").write_text(json.dumps({**config, "base_model_name_or_path": "tiny"}))
    torch.save(weights, source / "hydra_lm_head.pt")
    described = checkpoint.convert(source, tmp_path / "head")
    assert (described.kind, described.depths, described.blocks, described.target) == (kind, 2, 3, "tiny")
    _, named = checkpoint.read(tmp_path / "head")
    assert torch.equal(named["embed_tokens.weight"], weights["input_embed_fn.weight"])
    place = 5 if prefixed else 2
    assert torch.equal(named["blocks.1.2.linear.bias"], weights[f"hydra_mlp.1.{place}.linear.bias"])
    assert errors(tmp_path / "head", kind, exact_model, tokenizer, monkeypatch) < 1e-6


def test_dflash2_scales_and_bounds(tmp_path: Path) -> None:
    """As vLLM: the bound first, then the factor."""
    own = {**heads.config_of("dflash2", 40), "target_layer_ids": [0, 1], "input_embedding_scale": 2.5}
    own |= {"output_multiplier": 0.25, "final_logit_softcapping": 3.0}
    config = {**own["transformer_layer_config"], "dflash_config": own}
    checkpoint.write(tmp_path, config, heads.tensors_of("dflash2", 40))
    described, named = checkpoint.read(tmp_path)
    assert (described.kind, described.embedding_scale, described.rows) == ("dflash2", 2.5, 4)
    module: Any = networks.make(described)
    module.load_state_dict(named, strict=False)
    states = 5 * torch.randn(3, 32, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(module.logits(states), 0.25 * 3 * torch.tanh(module.lm_head(states) / 3))
    seen: list[Any] = []

    def attend(layer: int, q: Any, k: Any, v: Any) -> Any:
        seen.append(v)
        return q

    block, places = torch.tensor([[1, 3, 3, 3]]), torch.arange(4)[None]
    module(block, places, attend)
    module.embed_tokens.weight.data *= 2.5
    object.__setattr__(described, "embedding_scale", 1.0)
    module(block, places, attend)
    torch.testing.assert_close(seen[0], seen[2])


def test_the_published_dflash2_is_what_the_network_has() -> None:
    """Configuration, names and shapes of z-lab/Qwen3.8-27B-DFlash2: 81 tensors, no embedding and no output layer."""
    size, inner, vocabulary = 5120, 17408, 248320
    own = {"block_size": 8, "conv_group_size": 16, "conv_kernel_size": 2, "mask_token_id": 248070}
    own |= {"selector_rank": 256, "selector_top_k": 16, "target_layer_ids": [5, 19, 33, 47, 61]}
    config = {
        "architectures": ["DFlash2DraftModel"],
        "model_type": "qwen3",
        "hidden_size": size,
        "intermediate_size": inner,
        "num_hidden_layers": 5,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": vocabulary,
        "rms_norm_eps": 1e-6,
        "layer_types": ["sliding_attention"] * 5,
        "sliding_window": 2048,
        "use_sliding_window": True,
        "is_causal": False,
        "rope_parameters": {"rope_theta": 10000000, "rope_type": "default"},
        "dflash_config": own,
    }
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (size, 5 * size)}
    shapes |= {"norm.weight": (size,), "hidden_norm.weight": (size,)}
    shapes |= {f"candidate_selector.{each}_codebook": (vocabulary, 256) for each in ("predecessor", "successor")}
    shapes["candidate_selector.hidden_projection.weight"] = (256, size)
    for layer in range(5):
        at = f"layers.{layer}."
        shapes |= {f"{at}{name}.weight": (size,) for name in ("input_layernorm", "post_attention_layernorm")}
        for name, rows, columns in (("q", 4096, size), ("k", 1024, size), ("v", 1024, size), ("o", size, 4096)):
            shapes[f"{at}self_attn.{name}_proj.weight"] = (rows, columns)
        shapes |= {f"{at}self_attn.{name}_norm.weight": (128,) for name in "qk"}
        for name, rows, columns in (("gate", inner, size), ("up", inner, size), ("down", size, inner)):
            shapes[f"{at}mlp.{name}_proj.weight"] = (rows, columns)
        for part in ("attention", "mlp"):
            shapes |= {f"{at}{part}_conv.base_kernel": (2, 2, size)}
            shapes |= {f"{at}{part}_conv.kernel_projection.weight": (1280, size)}
    found = formats.parse(config, shapes, "a head")
    assert (found.kind, found.depths, found.layers) == ("dflash2", 7, (6, 20, 34, 48, 62))
    assert (found.sliding, found.window, found.sliding_causal) == ((0, 1, 2, 3, 4), 2048, False)
    assert (found.taps, found.group, found.candidates, found.selector_rank) == (2, 16, 16, 256)
    with torch.device("meta"):
        module = networks.make(found)
    expected = {name: tuple(each.shape) for name, each in module.state_dict().items() if "rotary." not in name}
    shared = {name: expected.pop(name) for name in ("embed_tokens.weight", "lm_head.weight")}
    assert set(shared.values()) == {(vocabulary, size)}
    assert expected == shapes
    assert len(shapes) == 81


def test_a_new_dflash2_is_a_dflash() -> None:
    """Its convolutions are the identity, and its selector leaves the logits alone."""
    config = formats.parse(
        heads.config_of("dflash2", 40),
        {k: tuple(v.shape) for k, v in heads.tensors_of("dflash2", 40).items()},
        "a head",
    )
    found: Any = networks.make(config)
    own = {field.name: getattr(config, field.name) for field in fields(DFlashConfig)}
    other: Any = networks.make(DFlashConfig(**{**own, "kind": "dflash"}))
    other.load_state_dict(found.state_dict(), strict=False)
    block, places = torch.tensor([[1, 3, 3, 3, 7, 3, 3, 3]]), torch.arange(4).repeat(2)[None]
    states, expected = (each(block, places, heads.causal) for each in (found, other))
    torch.testing.assert_close(states, expected)
    torch.testing.assert_close(found.one(states, block), other.one(expected, block))


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [False, True])
def test_dflash_in_its_own_form(
    is_causal: bool, exact_model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """Its ids count from the output of the first layer; JetSpec's differ by `causal_head` alone."""
    given = heads.config_of("dflash", vocabulary(exact_model))
    own = {"target_layer_ids": [0, 1], "mask_token_id": 3} | ({"causal_head": True} if is_causal else {})
    config = {**given["transformer_layer_config"], "block_size": 4, "dflash_config": own, "num_target_layers": 2}
    checkpoint.write(tmp_path, config, heads.tensors_of("dflash", vocabulary(exact_model)))
    assert (config_of := checkpoint.read(tmp_path)[0]).layers == (1, 2)
    assert config_of.causal == is_causal
    assert errors(tmp_path, "dflash", exact_model, tokenizer, monkeypatch) < 1e-6


def in_decoder(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**config, "transformer_layer_config": {**config["transformer_layer_config"], **changes}}


def speculating(config: dict[str, Any], tokens: int) -> dict[str, Any]:
    return {**config, "speculators_config": {"proposal_methods": [{"speculative_tokens": tokens}]}}


ODD: list[dict[str, Any]] = [  # fields of a decoder layer
    {"hidden_act": "x"},
    {"num_attention_heads": "4"},
    {"num_attention_heads": 0},
    {"num_attention_heads": -1},
    {"head_dim": 0},
    {"num_key_value_heads": 2**70},
    {"intermediate_size": None},
    {"rms_norm_eps": "x"},
    {"attention_bias": []},
    {"rope_parameters": {"rope_type": "x", "rope_theta": 1e4}},
    {"rope_parameters": {"rope_type": "default", "rope_theta": None}},
]


@pytest.mark.parametrize(
    ("kind", "change", "error", "message"),
    [
        ("hydra", lambda c: {**c, "hydra_head_arch": "eagle-attn"}, Refused, "of the architecture 'eagle-attn'"),
        ("hydra", lambda c: {**c, "grounded_heads": False}, Refused, "grounded_heads=False, which is not supported"),
        ("hydra", lambda c: {**c, "hidden_state_offset": 1}, Refused, "hidden_state_offset=1, which is not supported"),
        ("dflash", lambda c: in_decoder(c, model_type="llama"), Refused, "decoder layers of type 'llama'"),
        ("dflash", lambda c: in_decoder(c, layer_types=["chunked_attention"] * 2), Refused, "'chunked_attention'"),
        ("dflash", lambda c: in_decoder(c, **{**SLIDING, "sliding_window": 0}), BadParameter, "sliding_window=0"),
        ("dflash2", lambda c: {**c, "draft_ffn_type": "moe"}, Refused, "draft_ffn_type='moe', which is not supported"),
        ("dflash2", lambda c: {**c, "draft_vocab_size": 9}, Refused, "tokens, which is not supported in dflash2"),
        ("dflash2", lambda c: {**c, "selector_top_k": 0}, BadParameter, "selector_top_k=0"),
        ("dflash", lambda c: {**c, "speculators_model_type": "dflash2"}, BadParameter, "lack what is needed"),
        ("dflash", lambda c: {**c, "mask_token_id": 1 << 20}, BadParameter, "mask_token_id=1048576"),
        ("dflash", lambda c: {**c, "block_size": 1}, BadParameter, "block_size=1"),
        ("dflash", lambda c: {**c, "aux_hidden_state_layer_ids": [1, 7]}, BadParameter, "layers 1, 7, and the target"),
        ("dflash", lambda c: {**c, "aux_hidden_state_layer_ids": None}, BadParameter, "lack what is needed"),
        ("dflash", lambda c: {**c, "block_size": 258}, BadParameter, "predicts 257 tokens ahead"),
        ("dflash2", lambda c: {**c, "block_size": 2**70}, BadParameter, "at most 256 are drafted; the file is broken"),
        ("peagle", lambda c: speculating(c, 100_000), BadParameter, "predicts 100000 tokens ahead"),
        *(
            (kind, lambda c: in_decoder(c, num_hidden_layers=10**6), BadParameter, "and tensors of 2 layers")
            for kind in ("eagle3", "peagle", "dflash", "dflash2")
        ),
        ("eagle", lambda c: {**c, "num_hidden_layers": 3}, BadParameter, "num_hidden_layers=3 in its config.json"),
        *(
            ("eagle3", lambda c, wrong=wrong: in_decoder(c, **wrong), BadParameter, "cannot be made of its config.json")
            for wrong in ODD
        ),
        ("dspark", lambda c: {**c, "draft_vocab_size": -1}, BadParameter, "cannot be made of its config.json"),
        ("dspark", lambda c: {**c, "markov_head_type": "rnn"}, Refused, "markov_head_type='rnn'"),
        ("dspark", lambda c: {**c, "speculators_model_type": "xpress"}, Refused, "of kind 'xpress'"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    kind: str,
    change: Callable[[dict[str, Any]], dict[str, Any]],
    error: type[LeapaheadError],
    message: str,
    tiny_model: Any,
    tokenizer: Any,
    tmp_path: Path,
) -> None:
    size = vocabulary(tiny_model)
    checkpoint.write(tmp_path, change(heads.config_of(kind, size)), heads.tensors_of(kind, size))
    with pytest.raises(error) as found:
        LLM(tiny_model, tokenizer=tokenizer, drafter="head", head=str(tmp_path))
    assert message in str(found.value)
    assert "\n" not in str(found.value)


def test_a_hydra_of_a_single_head(tiny_model: Any, tokenizer: Any, tmp_path: Path) -> None:
    """Its time is that of forwards from the root, since there are no others."""
    found = heads.tensors_of("hydra", vocabulary(tiny_model))
    checkpoint.write(
        tmp_path,
        heads.config_of("hydra", vocabulary(tiny_model)),
        {name: each for name, each in found.items() if name.split(".")[1] == "0"},
    )
    with LLM(tiny_model, tokenizer=tokenizer, drafter="head", head=tmp_path) as llm:
        text = llm.generate(PROMPTS[0], max_new_tokens=12)
        assert text.tokens == llm.generate(PROMPTS[0], max_new_tokens=12, drafter="plain").tokens
