"""Views of a model with layers left out: right in every family, of shared weights, and found by the search."""

from __future__ import annotations

import copy
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from architectures import ARCHITECTURES, BY_NAME, FAST, Architecture
from helpers import GREEDY, run
from hypothesis import given
from hypothesis import strategies as st

from leapahead.core.errors import BadParameter, LeapaheadError, Refused
from leapahead.core.stop import StopParams
from leapahead.drafters.saved_skips import Found, expected, save, saved
from leapahead.layer_search import Agreement, Costs, search
from leapahead.models.base import CHAIN, HIDDEN, read_prompt
from leapahead.models.self_draft import layer_skip
from leapahead.models.self_draft.early_exit import EarlyExit
from leapahead.models.self_draft.int8 import Int8Linear, int8
from leapahead.models.self_draft.layer_skip import Skip, SubLayers, sub_layers, without
from leapahead.models.transformers.model import TransformersTarget
from leapahead.models.transformers.selftest import own_logits

IDS = np.arange(20, 32)[None]
REFUSED = {
    "gemma3n": "keys of others",
    "gemma4": "keys of others",
    "dbrx": "norm_attn_norm",
    "bert": "intermediate",
    "roberta": "intermediate",
    "bart": "more than add",  # norms come after the sums
    "dory": "more than add",  # its sums are interpolations
}
WITHOUT_PARTS = {"mamba": "token by token", "deepseek_v32": "token by token", "qwen3_next": "recurrent layers"}
FIT = [
    pytest.param(each, id=each.name, marks=() if each.name in FAST else pytest.mark.slow)
    for each in ARCHITECTURES
    if each.expect not in ("plain", "replay") and each.name not in REFUSED
]


def deep(name: str = "llama", count: int = 4) -> Any:
    return replace(BY_NAME[name], options={**BY_NAME[name].options, "num_hidden_layers": count}).build()


@pytest.fixture(scope="module")
def target() -> TransformersTarget:
    return TransformersTarget(deep())


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return own_logits(model, IDS)


@torch.no_grad()
def zeroed(model: Any, *modules: str) -> Any:
    """A copy in which all weights of these modules are zero, so that they add nothing."""
    other = copy.deepcopy(model)
    for module in modules:
        for parameter in other.get_submodule(module).parameters():
            parameter.zero_()
    return other


# ----------------------------------------------------------------------------------------------------------- families


@pytest.mark.slow
@pytest.mark.parametrize("architecture", FIT)
def test_leaving_out_is_adding_nothing(architecture: Architecture) -> None:
    """Of layer 0 and of layer 1, attention, MLP or both; nothing else of the model changes."""
    model = architecture.build()
    parts = SubLayers(model, architecture.name, IDS[0])
    before = logits(model)
    assert torch.equal(logits(parts.without(Skip())), before)
    for index, kind in ((0, "a"), (1, "m"), (1, "")):
        path = f"{parts._path}.{index}"
        layer = model.get_submodule(path)
        names = [layer_skip._first_of(layer, layer_skip.ATTENTION)] if kind != "m" else []
        names += layer_skip._mlp_of(layer) if kind != "a" else []
        wanted = logits(zeroed(model, *(f"{path}.{name}" for name in names)))
        found = logits(parts.without(Skip.parse(f"{index}{kind}")))
        assert not torch.allclose(wanted, before, atol=1e-3)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("architecture", FIT)
def test_views_are_targets(architecture: Architecture) -> None:
    """The cache, masks and positions of a model that lacks its first attention pass the test of every target."""
    target = TransformersTarget(architecture.build())
    assert without(target, Skip.parse("0a,1m")).info.capabilities == target.info.capabilities - {HIDDEN}


@pytest.mark.parametrize("name", [name for name in REFUSED if name in BY_NAME])
def test_what_cannot_be_cut_is_refused_by_name(name: str) -> None:
    target = TransformersTarget(BY_NAME[name].build(), name="this model")
    with pytest.raises(Refused, match=f"this model.*{REFUSED[name]}|{REFUSED[name]}.*this model"):
        without(target, Skip.parse("0"))


@pytest.mark.slow
@pytest.mark.parametrize("name", WITHOUT_PARTS)
def test_a_state_that_cannot_forget_is_refused(name: str) -> None:
    with pytest.raises(Refused, match=WITHOUT_PARTS[name]):
        EarlyExit(TransformersTarget(BY_NAME[name].build()), 1)


def test_a_forward_that_was_replaced_is_refused() -> None:
    """A function that holds the user's own modules would run them whole."""
    model = deep()
    own = model.model.forward
    target = TransformersTarget(model)
    model.model.forward = lambda *args, **kwargs: own(*args, **kwargs)
    with pytest.raises(Refused, match="does not call its decoder layers"):
        without(target, Skip.parse("1"))


def test_layers_that_do_more_are_refused() -> None:
    model = deep()
    target = TransformersTarget(model)
    model.model.layers[2].register_forward_hook(lambda module, args, output: output * 1.5)
    with pytest.raises(Refused, match="more than add"):
        without(target, Skip.parse("1"))


# -------------------------------------------------------------------------------------------------------------- views


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "skip"),
    [*(("llama", skip) for skip in ("0", "0-3a", "0-3m", "0-3", "0a,1m,2")), ("ministral", "3"), ("ministral", "1-2")],
)
def test_any_part_may_be_missing(name: str, skip: str) -> None:
    options = {"layer_types": ["sliding_attention", "full_attention"] * 2} if name == "ministral" else {}
    model = replace(BY_NAME[name], options={**BY_NAME[name].options, **options, "num_hidden_layers": 4}).build()
    target = TransformersTarget(model)
    view = without(target, Skip.parse(skip))
    assert view.info.capabilities == target.info.capabilities - {HIDDEN}
    text = run(view, prompt=range(3, 20), stop=StopParams(max_new_tokens=20)).tokens
    wanted = list(range(3, 20))
    with torch.no_grad():
        for _ in text:
            wanted.append(int(own_logits(view.model, np.array([wanted]))[0, -1].argmax()))
    assert text == wanted[17:]


def test_the_user_s_model_is_untouched(target: TransformersTarget) -> None:
    before, modules = logits(target.model), [(name, id(each)) for name, each in target.model.named_modules()]
    config = target.model.config.to_dict()
    view = without(target, Skip.parse("0a,1m,2"))
    view.model.config.num_hidden_layers = 1
    view.model.model.layers[3].register_forward_hook(lambda module, args, output: output * 0)
    view.model.train()
    assert torch.equal(logits(target.model), before)
    assert [(name, id(each)) for name, each in target.model.named_modules()] == modules
    assert target.model.config.to_dict() == config
    assert not target.model.training
    assert not {id(each) for each in view.model.modules()} & {id(each) for each in target.model.modules()}


def test_weights_are_shared(target: TransformersTarget) -> None:
    view = without(target, Skip.parse("0a,1m,2"))
    mine = {name: each.data_ptr() for name, each in view.model.named_parameters()}
    theirs = {name: each.data_ptr() for name, each in target.model.named_parameters()}
    assert mine.items() < theirs.items()
    assert {each.data_ptr() for each in view.model.buffers()} <= {each.data_ptr() for each in target.model.buffers()}


def test_a_layer_without_attention_keeps_no_entries(target: TransformersTarget) -> None:
    view = without(target, Skip.parse("0a,2"))
    session = view.open(range(3, 30), GREEDY)
    read_prompt(view, session)
    session.close()
    (planes,) = view.executor.cache.groups
    assert len(planes.entries) == 2 * 2  # keys and values of two of four layers


def test_the_first_layers_are_a_shallower_model(target: TransformersTarget) -> None:
    shallow = deep(count=2)
    shallow.load_state_dict(
        {name: each for name, each in target.model.state_dict().items() if name in shallow.state_dict()}
    )
    view = EarlyExit(target, 2)
    assert torch.equal(logits(view.model), logits(shallow))
    assert view.info.name == f"{target.info.name} first 2 layers"
    assert torch.equal(logits(EarlyExit(target, 4).model), logits(target.model))


def test_views_have_their_own_names(target: TransformersTarget) -> None:
    """What their forwards cost is not what the target's cost."""
    views = [target, without(target, Skip()), without(target, Skip.parse("1")), without(target, Skip.parse("2"))]
    assert len({each.info.fingerprint for each in views}) == len({each.info.name for each in views}) == 4


def test_half_precision() -> None:
    model = BY_NAME["llama"].build(torch.bfloat16)
    assert CHAIN in without(TransformersTarget(model), Skip.parse("0m,1a")).info.capabilities


def test_layers_that_are_not_there(target: TransformersTarget) -> None:
    with pytest.raises(BadParameter, match=r"layer 4 cannot be left out: .* has layers 0 to 3"):
        without(target, Skip.parse("3-4"))
    for count in (0, 5):
        with pytest.raises(BadParameter, match="give self:first=1 to self:first=4"):
            EarlyExit(target, count)


# --------------------------------------------------------------------------------------------------------------- int8


def half(name: str, **options: Any) -> TransformersTarget:
    built = replace(BY_NAME[name], options={**BY_NAME[name].options, **options})
    return TransformersTarget(built.build(torch.bfloat16), name="this model")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "llama_mqa", "opt", "bloom", "phi3"])
def test_int8_is_nearly_the_model(name: str) -> None:
    """Plain, with tied embeddings, with biases, for chains only, with joined matrices."""
    target = half(name, **{"ffn_dim" if name == "opt" else "intermediate_size": 64})
    with torch.no_grad():
        few, before = own_logits(target.model, IDS[:, :4]), logits(target.model)
        weights = {each.data_ptr(): each.dtype for each in target.model.parameters()}
        view = int8(target)
        assert view.info.capabilities == target.info.capabilities - {HIDDEN}
        assert 0 < (own_logits(view.model, IDS[:, :4]) - few).std() / few.std() < 0.1
    assert torch.equal(logits(view.model), before)  # many tokens go through the user's weights
    assert torch.equal(logits(target.model), before)
    assert {each.data_ptr(): each.dtype for each in target.model.parameters()} == weights
    assert {each.data_ptr() for each in view.model.parameters()} == set(weights)
    integers = [each.integers for each in view.model.modules() if isinstance(each, Int8Linear)]
    assert {each.dtype for each in integers} == {torch.int8}
    others = [each for each in view.model.modules() if not isinstance(each, Int8Linear)]
    assert not any(type(child) is torch.nn.Linear for each in others for child in each.children())


def test_layers_that_the_kernel_cannot_read_stay() -> None:
    """It would read beyond the end of a row of 40."""
    view = int8(half("llama", intermediate_size=40, num_hidden_layers=4))
    mlp = view.model.model.layers[0].mlp
    assert isinstance(mlp.up_proj, Int8Linear)
    assert type(mlp.down_proj) is torch.nn.Linear


@pytest.mark.slow
def test_int8_refuses(target: TransformersTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Refused, match="is float32 on cpu"):
        int8(target)
    with pytest.raises(Refused, match=r"this model has 0 of .* weights beside its embedding"):
        int8(half("gpt2"))  # whose matrices are the transposed ones of its own class
    with pytest.raises(Refused, match="token by token"):
        int8(half("mamba"))
    monkeypatch.setitem(sys.modules, "optimum.quanto", None)
    with pytest.raises(LeapaheadError, match=r'needs optimum, .*pip install "leapahead\[int8\]"'):
        int8(half("llama"))


# --------------------------------------------------------------------------------------------------------------- text


@pytest.mark.parametrize(
    ("text", "attention", "mlp", "shown"),
    [
        ("", set(), set(), ""),
        ("3a,5m,7", {3, 7}, {5, 7}, "3a,5m,7"),
        ("4-9", set(range(4, 10)), set(range(4, 10)), "4-9"),
        ("4-6a, 5m", {4, 5, 6}, {5}, "4a,5,6a"),
        ("2,1,0a,0m", {0, 1, 2}, {0, 1, 2}, "0-2"),
    ],
)
def test_text(text: str, attention: set[int], mlp: set[int], shown: str) -> None:
    skip = Skip.parse(text)
    assert (skip.attention, skip.mlp, str(skip)) == (attention, mlp, shown)
    assert bool(skip) is bool(text)


@given(st.frozensets(st.integers(0, 40)), st.frozensets(st.integers(0, 40)))
def test_text_both_ways(attention: frozenset[int], mlp: frozenset[int]) -> None:
    skip = Skip(attention, mlp)
    assert Skip.parse(str(skip)) == skip


@pytest.mark.parametrize("text", ["x", "3b", "3,,4", "-1", "5-3", "a", "3.5", "1-9999999999", ","])
def test_text_that_is_none(text: str) -> None:
    with pytest.raises(BadParameter, match="skip="):
        Skip.parse(text)


# ------------------------------------------------------------------------------------------------------------- search


PROMPTS = [list(range(3, 20)), list(range(40, 60)), [5, 6, 7, 5, 6]]
EVEN = Costs(layers=4, attention=0.4, mlp=0.4, whole=0.9)


@pytest.fixture
def even(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times that are the same on every machine."""
    monkeypatch.setattr(Costs, "measure", classmethod(lambda cls, parts, token: EVEN))


@pytest.fixture(scope="module")
def idle() -> TransformersTarget:
    """All of layer 1, attention of layer 2 and the MLP of layer 3 add nothing."""
    model = deep()
    idle = ("1.self_attn", "1.mlp", "2.self_attn", "3.mlp")
    return TransformersTarget(zeroed(model, *(f"model.layers.{name}" for name in idle)), name="idle")


@pytest.mark.slow
@pytest.mark.usefixtures("even")
def test_the_search_finds_what_does_nothing(idle: TransformersTarget) -> None:
    seen: list[tuple[int, Found]] = []
    found = search(idle, PROMPTS, trials=60, progress=lambda *each: seen.append(each), new=24)
    assert [number for number, _ in seen] == list(range(1, 61))
    assert [each.speedup for _, each in seen] == sorted(each.speedup for _, each in seen)
    assert seen[-1][1] == found
    assert found.agreement == 1.0
    assert found.skip.attention <= {1, 2}
    assert found.skip.mlp <= {1, 3}
    assert len(found.skip.attention) + len(found.skip.mlp) >= 3
    assert found.cost == pytest.approx(EVEN.left(found.skip))
    assert found.speedup == pytest.approx(17 / (16 * found.cost + 1))
    assert (found.length, found.trials) == (16, 60)


@pytest.mark.slow
@pytest.mark.usefixtures("even")
def test_a_seed_gives_one_result(idle: TransformersTarget) -> None:
    assert search(idle, PROMPTS, 12, 3, new=8) == search(idle, PROMPTS, 12, 3, new=8)


@pytest.mark.usefixtures("even")
def test_where_nothing_pays_nothing_is_left_out() -> None:
    """A model whose every sub-layer matters."""
    found = search(TransformersTarget(deep()), PROMPTS, trials=4, new=16)
    assert (found.skip, found.agreement, found.cost, found.speedup) == (Skip(), 1.0, 1.0, 1.0)


def test_times_are_measured(target: TransformersTarget) -> None:
    costs = Costs.measure(sub_layers(target), 5, rounds=3)
    assert 0 < costs.whole < 1
    assert costs.left(Skip()) == 1.0
    assert costs.left(Skip.layers(range(4))) == pytest.approx(1 - costs.whole)


def test_shares_of_time() -> None:
    assert EVEN.left(Skip.parse("0a")) == pytest.approx(0.9)
    assert EVEN.left(Skip.parse("0a,1m,2")) == pytest.approx(1 - 0.1 - 0.1 - 0.225)


def test_agreement(target: TransformersTarget) -> None:
    agreement = Agreement(target, PROMPTS, new=16)
    assert agreement.of(target.model) == 1.0
    assert agreement.of(without(target, Skip.parse("0-3")).model) < 0.5
    assert len(PROMPTS) <= agreement.tokens <= 16 * len(PROMPTS)


def test_the_formula() -> None:
    for a, c in ((0.8, 0.1), (0.5, 0.5), (0.0, 0.3), (0.99, 0.02)):
        every = [(1 - a ** (k + 1)) / (1 - a) / (k * c + 1) for k in range(1, 17)]
        assert expected(a, c) == (pytest.approx(max(every)), every.index(max(every)) + 1)
    assert expected(1.0, 1.0) == (1.0, 1)
    assert expected(1.0, 0.0) == (17.0, 16)


def test_the_search_refuses(target: TransformersTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadParameter, match="no texts"):
        search(target, [])
    with pytest.raises(BadParameter, match="seed=-1"):
        search(target, PROMPTS, seed=-1)
    with pytest.raises(BadParameter, match="trials=0"):
        search(target, PROMPTS, trials=0)
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(LeapaheadError, match=r'needs optuna.*pip install "leapahead\[skip\]"'):
        search(target, PROMPTS)


# --------------------------------------------------------------------------------------------------------------- kept


FOUND = Found(Skip.parse("1a,2"), 0.9, 0.5, 1.5, 60)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LEAPAHEAD_CACHE", str(tmp_path))
    return tmp_path / "skip"


def called(name: str, target: TransformersTarget) -> TransformersTarget:
    other = copy.copy(target)
    other.info = replace(target.info, name=name)
    return other


def test_what_was_found_is_kept(target: TransformersTarget, idle: TransformersTarget, folder: Path) -> None:
    assert saved(target) is None
    assert save(target, FOUND)
    assert saved(target) == FOUND.skip
    assert saved(idle) is None  # of the same shape, and another model
    assert saved(called("another/name", target)) == FOUND.skip
    assert len(list(folder.iterdir())) == 1


def test_a_model_whose_weights_cannot_be_read_is_known_by_its_place(
    target: TransformersTarget, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TransformersTarget, "weights_digest", lambda self: "")
    monkeypatch.chdir(folder.parent)
    (folder.parent / "model").mkdir()
    save(called("model", target), FOUND)
    for name, found in (("./model/", FOUND.skip), (str(folder.parent / "model"), FOUND.skip), ("a/model", None)):
        assert saved(called(name, target)) == found


@pytest.mark.parametrize(
    "wrong",
    [
        *("", "{", "[]", "3", '{"format": 1}'),
        *({"format": 1}, {"weights": "x"}, {"target": 1}, {"skip": "x"}, {"skip": 3}, {"skip": "4"}),
    ],
)
def test_a_broken_file_is_ignored(target: TransformersTarget, folder: Path, wrong: Any) -> None:
    save(target, FOUND)
    (path,) = folder.iterdir()
    text = wrong if isinstance(wrong, str) else json.dumps(json.loads(path.read_text()) | wrong)
    path.write_text(text)
    assert saved(target) is None
    assert save(target, FOUND)
    assert saved(target) == FOUND.skip


def test_a_folder_that_cannot_be_written(
    target: TransformersTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LEAPAHEAD_CACHE", str(tmp_path / "file"))
    assert not save(target, FOUND)
    assert saved(target) is None
