"""Stand-in models: the source's logits and text, in the shapes and at the size of another model."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import heads
import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from leapahead import LLM
from leapahead.bench import prompts
from leapahead.core.errors import BadParameter, LeapaheadError, Refused
from leapahead.models import loading
from leapahead.models.transformers.arguments import cache_name
from research import hybrid, widening
from research import standin as module
from research.cli import main as research
from research.standin import COSTS, Recurrent, Shapes, standin

TOKENS = torch.randint(0, 300, (3, 40), generator=torch.Generator().manual_seed(1))  # [texts, tokens]

# The source of most tests: hidden 32, intermediate 64, 2 layers, 4 heads on 2 key-value heads of dimension 8.
Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Writes a random llama, with norm weights that are not all one."""

    def write(name: str = "source", **options: Any) -> Path:
        shapes: dict[str, Any] = {
            "vocab_size": 300,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
            "initializer_range": 0.3,
            "rms_norm_eps": 0.01,  # large, so that it would be seen if it were not scaled
        }
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            model = LlamaForCausalLM(LlamaConfig(**shapes | options))
            for key, value in model.state_dict().items():
                if "norm" in key:
                    value.normal_(mean=1, std=0.3)
        model.save_pretrained(tmp_path / name)
        return tmp_path / name

    return write


@torch.no_grad()
def logits(folder: Path | str, tokens: torch.Tensor = TOKENS, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    found: torch.Tensor = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)(tokens).logits
    assert found.isfinite().all()
    return found


def deviation(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, over the spread of the logits."""
    return ((ours - expected).abs().max() / expected.std()).item()


def shapes(
    hidden: int = 80, intermediate: int = 96, layers: int = 5, heads: int = 5, kv: int = 5, dim: int = 8, v: int = 300
) -> Shapes:
    return Shapes(hidden, intermediate, layers, heads, kv, dim, v, "a test")


# ---------------------------------------------------------------------------------------------------- equal logits

KINDS = {
    "a residual with a copy, groups of one": shapes(),
    "groups of three": shapes(heads=10, kv=2, hidden=80),
    "more key-value heads": shapes(hidden=96, heads=16, kv=8),
    "a power of four": shapes(hidden=128, heads=8, kv=4),
    "beyond a power of four": shapes(hidden=288, heads=8, kv=4),
    "no room for a copy": shapes(hidden=48, heads=6, kv=3),
    "the same residual": shapes(hidden=32, heads=4, kv=2, intermediate=65, layers=2),
    "twice the head dimension": shapes(heads=8, kv=4, dim=16),
    "four times the head dimension, groups of one": shapes(hidden=64, heads=4, kv=4, dim=32),
    "a larger vocabulary": shapes(v=3000),
    "a smaller vocabulary": shapes(v=8, layers=20),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_logits_are_the_sources(make: Make, tmp_path: Path, kind: str) -> None:
    source = make()
    made = standin(source, KINDS[kind], tmp_path / "out", dtype="float32")
    assert deviation(logits(tmp_path / "out"), logits(source)) < 1e-4
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    real = KINDS[kind]
    assert (config["hidden_size"], config["intermediate_size"]) == (real.hidden, real.intermediate)
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (real.heads, real.kv_heads)
    assert (config["head_dim"], config["num_hidden_layers"]) == (real.head_dim, made.shapes.layers)
    assert config["vocab_size"] == 300


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"tie_word_embeddings": False},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1},
        {"num_attention_heads": 8, "head_dim": 4},
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ],
    ids=str,
)
def test_other_sources(make: Make, tmp_path: Path, options: dict[str, Any]) -> None:
    source = make(**options)
    standin(source, shapes(hidden=96, heads=16, kv=8, dim=16), tmp_path / "out", dtype="float32")
    assert deviation(logits(tmp_path / "out"), logits(source)) < 1e-4


@pytest.mark.slow
def test_in_bfloat16_the_rounded_source_is_meant(make: Make, tmp_path: Path) -> None:
    """Exactly where the copy's scale is 0 or 1, nearly elsewhere; in bfloat16 it is as near as the source itself."""
    source = make()
    AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).save_pretrained(tmp_path / "rounded")
    rounded = logits(tmp_path / "rounded")
    noise = deviation(logits(tmp_path / "rounded", dtype=torch.bfloat16).float(), rounded)
    for hidden, limit in ((128, 1e-4), (64, 1e-4), (80, noise)):
        out = tmp_path / str(hidden)
        standin(source, shapes(hidden=hidden, heads=8, kv=4), out)
        assert {tensor.dtype for tensor in load_file(out / "model.safetensors").values()} == {torch.bfloat16}
        assert deviation(logits(out), rounded) < limit
        assert deviation(logits(out, dtype=torch.bfloat16).float(), rounded) < 2 * noise


def test_a_stand_in_that_is_wrong_would_be_seen(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy left out, or the epsilon as it was."""
    source = make()
    standin(source, shapes(), tmp_path / "right", dtype="float32")
    config = json.loads((tmp_path / "right" / "config.json").read_text())
    assert config["rms_norm_eps"] == 0.01  # the factor is 4^0 here
    standin(source, shapes(hidden=160), tmp_path / "quarter", dtype="float32")
    file = tmp_path / "quarter" / "config.json"
    config = json.loads(file.read_text())
    assert config["rms_norm_eps"] == 0.0025
    file.write_text(json.dumps(config | {"rms_norm_eps": 0.01}))
    assert deviation(logits(tmp_path / "quarter"), logits(source)) > 1e-3
    monkeypatch.setattr(widening, "residual", lambda d, wide: (0.0, 1.0))
    standin(source, shapes(), tmp_path / "wrong", dtype="float32")
    assert deviation(logits(tmp_path / "wrong"), logits(source)) > 0.1


@pytest.mark.slow
def test_135m(tmp_path: Path) -> None:
    """The bundled model at the cost of 135M parameters: logits on real prompts, and greedy texts token for token."""
    out = tmp_path / "135m"
    made = standin(None, "135m", out, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(out)
    stand_in, source = (AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32) for f in (out, loading.bundled()))
    assert sum(p.numel() for p in stand_in.parameters()) == made.shapes.per_token - made.shapes.hidden
    assert made.weights == 4 * sum(p.numel() for p in stand_in.parameters())
    assert made.head_layers == 7
    assert made.shapes.per_token == pytest.approx(COSTS["135m"].per_token, rel=0.01)
    with torch.no_grad():
        for prompt in prompts.BUNDLED[:4]:
            tokens = tokenizer(prompt, return_tensors="pt").input_ids
            assert deviation(stand_in(tokens).logits, source(tokens).logits) < 1e-4
    texts = [
        [result.tokens for result in llm.generate(list(prompts.BUNDLED[:3]), max_new_tokens=64, ignore_eos=True)]
        for llm in (LLM(model, tokenizer=tokenizer, drafter="plain") for model in (stand_in, source))
    ]
    assert [len(text) for text in texts[0]] == [64] * 3
    assert texts[0] == texts[1]
    shutil.rmtree(out)  # half a gigabyte, which pytest would keep for three runs


# ------------------------------------------------------------------------------------------------- shapes and cost


@pytest.mark.parametrize(
    ("cost", "parameters"),  # of the published checkpoints, where the embedding of 7b is not the head
    [
        ("135m", 134_515_008),
        ("360m", 361_821_120),
        ("1b", 1_235_814_400),
        ("3b", 3_212_749_824),
        ("7b", 6_738_415_616 - 32000 * 4096),
        ("hybrid-350m", 340_332_224),
    ],
)
def test_costs_are_those_of_the_published_models(cost: str, parameters: int) -> None:
    real = COSTS[cost]
    assert real.per_token - real.hidden == parameters
    assert real.source.startswith("config.json of ")


def test_layers_make_up_for_the_vocabulary(make: Make, tmp_path: Path) -> None:
    source = make()
    for vocab, more in ((300, 0), (3000, 6), (20000, 44)):  # a layer has 36,000 parameters, a row of the head 80
        real = shapes(v=vocab)
        made = standin(source, real, tmp_path / str(vocab))
        assert made.head_layers == more
        assert abs(made.shapes.per_token - real.per_token) <= real.layer / 2
    assert standin(source, shapes(v=8, layers=2), tmp_path / "fewer").shapes.layers == 2  # never fewer than the source


def test_only_what_must_be_zero_is(make: Make, tmp_path: Path) -> None:
    """Layers that add zero are spread, the last is the source's; what they read with is as random as the source."""
    source = make()
    standin(source, shapes(hidden=96, heads=6, kv=3), tmp_path / "out", dtype="float32")
    ours, theirs = load_file(tmp_path / "out" / "model.safetensors"), load_file(source / "model.safetensors")
    filled = [i for i in range(5) if ours[f"model.layers.{i}.mlp.down_proj.weight"].any()]
    assert filled == [1, 4]
    for layer in range(5):
        assert ours[f"model.layers.{layer}.self_attn.o_proj.weight"].any() == (layer in filled)
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            wide, origin = (
                weights[f"model.layers.{i}.{name}.weight"]
                for weights, i in ((ours, layer), (theirs, 0 if layer < 2 else 1))
            )
            assert wide.all()
            assert wide.std().item() == pytest.approx(origin.std().item(), rel=0.1)
    subnormal = torch.finfo(torch.float32).tiny
    assert not any(((tensor != 0) & (tensor.abs() < subnormal)).any() for tensor in ours.values())


def test_the_seed(make: Make, tmp_path: Path) -> None:
    source = make()
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        standin(source, shapes(), tmp_path / name, seed=seed, dtype="float32")
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c
    assert deviation(logits(tmp_path / "c"), logits(tmp_path / "a")) < 1e-4


def test_shards(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the stand-in, and of a source."""
    monkeypatch.setattr(module, "SHARD_BYTES", 100_000)
    source, seen = make(), []
    made = standin(
        source,
        shapes(),
        tmp_path / "out",
        dtype="float32",
        progress=lambda what, done, total: seen.append((done, total)),
    )
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 5
    assert files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    assert all(file.stat().st_size < 110_000 for file in files)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == made.weights
    assert deviation(logits(tmp_path / "out"), logits(source)) < 1e-4
    assert seen == [(done, len(seen) - 1) for done in range(len(seen))]
    standin(tmp_path / "out", shapes(hidden=160, heads=10, kv=10, layers=6), tmp_path / "again", dtype="float32")
    assert deviation(logits(tmp_path / "again"), logits(source)) < 1e-4


@pytest.mark.slow
def test_what_comes_with_it(tiny_folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(tiny_folder, source)
    (source / "LICENSE").write_text("Yours.")
    standin(source, shapes(v=400), tmp_path / "out")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "LICENSE"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    card = (tmp_path / "out" / "README.md").read_text()
    assert "speed measurements" in card
    assert "This is source," in card
    assert str(tmp_path) not in card
    assert LLM(str(tmp_path / "out")).generate("def add(a, b):", max_new_tokens=8, ignore_eos=True).stats.committed == 8


# --------------------------------------------------------------------------------------------------------- hybrids

HYBRID = replace(shapes(hidden=96, heads=6, kv=3, layers=6), recurrent=Recurrent(1, 6, 32, 16))


@pytest.mark.slow
def test_a_hybrid_has_the_sources_logits(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly without what the recurrent layers add; nearly with it, in chunks as in steps."""
    source = make()
    made = standin(source, HYBRID, tmp_path / "out", dtype="float32")
    assert (made.shapes.layers, made.shapes.attention) == (7, 2)  # attention in as many layers as the source has
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert model.config.layer_types == [
        "full_attention" if layer in (2, 6) else "linear_attention" for layer in range(7)
    ]
    assert sum(p.numel() for p in model.parameters()) == made.shapes.per_token - made.shapes.hidden
    assert made.shapes.per_token == pytest.approx(HYBRID.per_token, abs=HYBRID.recurrent_layer / 2)
    ours, expected = logits(tmp_path / "out"), logits(source)
    assert 1e-4 < (ours - expected).std() / expected.std() < 0.02
    monkeypatch.setattr(hybrid, "SHARE", 0.0)
    standin(source, HYBRID, tmp_path / "none", dtype="float32")
    assert deviation(logits(tmp_path / "none"), logits(source)) < 1e-4


@torch.no_grad()
@pytest.mark.slow
def test_the_state_of_a_hybrid_matters(make: Make, tmp_path: Path) -> None:
    """That of one token before is wrong, and so is none. Over many tokens it neither grows nor vanishes."""
    standin(make(), HYBRID, tmp_path / "out", dtype="float32")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    whole = model(TOKENS).logits[:, -1:]

    def after(change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> float:
        cache, late = (model(TOKENS[:, :-n], use_cache=True)[cache_name(model)] for n in (1, 2))
        for ours, theirs in zip(cache.layers, late.layers, strict=True):
            if hasattr(ours, "recurrent_states"):
                state = ours.recurrent_states[0]
                state.copy_(change(state, theirs.recurrent_states[0]))
        return deviation(model(TOKENS[:, -1:], **{cache_name(model): cache}).logits, whole)

    assert after(lambda state, late: state) < 1e-5
    assert after(lambda state, late: late) > 1e-4
    assert after(lambda state, late: state * 0) > 1e-4
    cache = model(TOKENS.repeat(1, 100), use_cache=True)[cache_name(model)]
    sizes = [
        layer.recurrent_states[0].abs().max().item() for layer in cache.layers if hasattr(layer, "recurrent_states")
    ]
    assert all(0.01 < size < 100 for size in sizes)


@pytest.mark.slow
def test_a_hybrid_loads(tiny_folder: Path, tmp_path: Path) -> None:
    """Here, and in llama.cpp, with the same logits."""
    llama_cpp = pytest.importorskip("llama_cpp")
    out, file = tmp_path / "out", tmp_path / "out.gguf"
    standin(tiny_folder, replace(HYBRID, vocab=400), out, dtype="float32")
    assert "7 layers" not in (out / "README.md").read_text()
    assert LLM(str(out)).generate("def add(a, b):", max_new_tokens=8, ignore_eos=True).stats.committed == 8

    def export(*args: str) -> Result:
        return CliRunner(env={"COLUMNS": "120"}).invoke(research, ["hybrid-gguf", *args])

    result = export(str(out), str(file), "--type", "f32")
    assert (result.exit_code, result.stderr) == (0, "")
    tokens = TOKENS[0].clamp(max=270)
    model = llama_cpp.Llama(str(file), n_ctx=64, logits_all=True, type_k=0, type_v=0, verbose=False)
    model.eval(tokens.tolist())
    expected = logits(out, tokens[None])[0]
    assert deviation(torch.tensor(model.scores[: len(tokens)]), expected) < 1e-4
    model.close()

    assert "exists" in export(str(out), str(file)).stderr
    assert "use `leapahead export-gguf`" in export(str(tiny_folder), str(tmp_path / "llama.gguf")).stderr


# ------------------------------------------------------------------------------------------------------- bad input


def renew(folder: Path, **values: Any) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    return folder


@pytest.mark.parametrize(
    ("real", "words"),
    [
        (shapes(hidden=16), "hidden size is 16, the source's is 32"),
        (shapes(intermediate=63), "intermediate size is 63, the source's is 64"),
        (shapes(layers=1), "number of layers is 1, the source's is 2"),
        (shapes(dim=4), "head dimension is 4, the source's is 8"),
        (shapes(dim=12), "head dimension of 12, which is no multiple of 8"),
        (shapes(kv=1), "1 key-value heads, and the source's 4 heads on 2 need 2"),
        (shapes(heads=3, kv=3), "3 key-value heads, and the source's 4 heads on 2 need 4"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_cost_below_the_source(make: Make, tmp_path: Path, real: Shapes, words: str) -> None:
    with pytest.raises(BadParameter, match=words):
        standin(make(), real, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_sources_that_cannot_be(make: Make, tmp_path: Path) -> None:
    def refused(source: Path, error: type[LeapaheadError], words: str, real: Shapes | None = None) -> None:
        with pytest.raises(error, match=words):
            standin(source, real or shapes(), tmp_path / "out")
        assert not (tmp_path / "out").exists()

    refused(tmp_path / "nowhere", BadParameter, "nowhere is no model folder: there is no config.json")
    refused(renew(make("gpt"), model_type="gpt2"), Refused, "of the Llama architecture, and .* holds 'gpt2'")
    refused(renew(make("biases"), attention_bias=True), Refused, "has biases")
    refused(renew(make("quantised"), quantization_config={"bits": 4}), Refused, "quantised")
    refused(renew(make("odd"), hidden_size="32"), BadParameter, "describes no Llama")
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 512}
    refused(make("yarn", rope_parameters=yarn), Refused, "of type 'yarn' cannot be spread", shapes(dim=16))

    folder = make("json")
    (folder / "config.json").write_text("{")
    refused(folder, BadParameter, "config.json cannot be read")
    (folder / "config.json").write_text("[]")
    refused(folder, BadParameter, "config.json is no JSON object")
    folder = make("bare")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    refused(folder, BadParameter, "lack model.norm.weight")
    (folder / "model.safetensors").write_bytes(b"not weights at all")
    refused(folder, BadParameter, "model.safetensors cannot be read")
    (folder / "model.safetensors").unlink()
    refused(folder, BadParameter, "holds no weights in safetensors")


def test_other_bad_input(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make()
    with pytest.raises(BadParameter, match="unknown cost '2b'; there are 135m, 360m, 1b, 3b, 7b"):
        standin(source, "2b", tmp_path / "out")
    with pytest.raises(BadParameter, match="float32 or bfloat16, not 'int8'"):
        standin(source, shapes(), tmp_path / "out", dtype="int8")
    with pytest.raises(BadParameter, match="source is not empty"):
        standin(source, shapes(), source)
    with pytest.raises(BadParameter, match="is a file"):
        standin(source, shapes(), source / "config.json")
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(10, 10, 10**9))
    with pytest.raises(Refused, match=r"needs 2\.4 GB, and .* has 1\.0 GB free"):
        standin(None, "1b", tmp_path / "deep" / "out")
    assert not (tmp_path / "deep").exists()


# ----------------------------------------------------------------------------------------------------- the command


def run(*args: str) -> Result:
    return CliRunner(env={"COLUMNS": "120"}).invoke(research, ["standin", *args])


def test_the_command(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COSTS, "small", shapes(v=3000))
    out = tmp_path / "new" / "out"
    result = run("--from", str(tiny_folder), "--cost", "small", "--out", str(out), "--dtype", "float32")
    assert (result.exit_code, result.stderr) == (0, "")
    assert " layers, " in result.stdout
    assert "million parameters read per token" in result.stdout
    assert deviation(logits(out), logits(tiny_folder)) < 1e-4
    result = run("--from", str(tiny_folder), "--cost", "small", "--out", str(out))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"error: {out} is not empty; name a new folder for the stand-in\n"


def test_the_help_names_every_cost() -> None:
    text = run("--help").stdout
    assert "|".join(COSTS) in text


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["medusa", "eagle", "eagle3"])
def test_a_head_drafts_the_same_for_a_stand_in(
    kind: str, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make()
    monkeypatch.setattr(loading, "bundled", lambda *_: str(source))
    standin(source, shapes(), tmp_path / "large", "float32")
    head = heads.write(tmp_path / "head", kind, 300)
    result = CliRunner().invoke(research, ["standin-head", str(head), str(tmp_path / "large"), str(tmp_path / "wide")])
    assert result.exit_code == 0, result.output
    found = []
    for model, folder in ((source, head), (tmp_path / "large", tmp_path / "wide")):
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
        llm = LLM(loaded, drafter="head", head=str(folder), nodes=6, drafter_cache=False)
        states = llm.generate([[5, 6, 7, 8]] * 2, max_new_tokens=12, ignore_eos=True)
        found.append([(each.tokens, each.stats.drafted, each.stats.accepted, each.stats.steps) for each in states])
    assert found[0] == found[1]
