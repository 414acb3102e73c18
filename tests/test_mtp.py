"""MTP modules: candidates against Transformers' own modules, texts against plain decoding, mistakes, refusals."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import heads
import mtp
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config
from transformers.generation.candidate_generator import MTPCandidateGenerator
from transformers.modeling_layers import MtpLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding

from leapahead import LLM, BadParameter, Refused
from leapahead.drafters.heads import checkpoint
from leapahead.drafters.heads import mtp as our_mtp
from leapahead.drafters.heads.config import TYPE
from leapahead.drafters.heads.row_head import RowHead, RowText
from leapahead.models.base import ALL
from leapahead.models.toy import ToyTarget
from leapahead.models.transformers import linears, packing

PROMPTS = [[5, 7, 9, 11, 3, 5, 7, 9, 11, 3, 5], [40, 41, 40], [8, 30, 31, 32, 8, 30]]
TREE, CHAIN = {"nodes": 12, "depth": 3}, {"nodes": 5, "depth": 5, "chain": True}
CASES = [("glm4_moe", 1, CHAIN), ("glm4_moe", 3, TREE), ("glm4_moe", 3, CHAIN), ("deepseek_v3", 2, TREE)]
CASES += [("mellum", 1, TREE), ("glm4_moe", 1, TREE), ("deepseek_v3", 2, CHAIN), ("mellum", 1, CHAIN)]
CASES += [("qwen3_next", 1, CHAIN), ("qwen3_5", 1, CHAIN), ("qwen3_5_moe", 1, CHAIN)]
SLOW = 5  # from here on
MOST_ERROR = 1e-4


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, int], Any]]:
    """Makes the target of each model once."""
    known: dict[tuple[str, int], Any] = {}
    with pytest.MonkeyPatch.context() as patch:

        def model(name: str, modules: int) -> Any:
            if (name, modules) not in known:
                folder = mtp.write(tmp_path_factory.mktemp("mtp") / f"{name}-{modules}", name, modules)
                known[name, modules] = LLM(mtp.load(folder, patch), drafter="plain").target
            return known[name, modules]

        yield model


def texts(llm: LLM, **options: Any) -> list[list[int]]:
    found = llm.generate(PROMPTS, max_new_tokens=20, seed=5, ignore_eos=True, **options)
    return [text.tokens for text in found]


def plain(target: Any, **options: Any) -> list[list[int]]:
    return texts(LLM(target, drafter="plain"), **options)


# ------------------------------------------------------------------------------------------------- the candidates


@pytest.mark.slow
@pytest.mark.parametrize(("name", "modules", "options"), CASES, ids=str)
def test_candidates_are_those_of_a_full_recomputation(
    name: str, modules: int, options: dict[str, Any], models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In batches, in trees, and in chains that are longer than there are modules; the texts are plain decoding's."""
    target = models(name, modules)
    found = heads.recording(monkeypatch)
    temperature = 0.8 if "chain" in options else 0.0
    llm = LLM(target, drafter="head", head="mtp", **options)
    assert texts(llm, temperature=temperature) == plain(target, temperature=temperature)
    assert {len(each.path) for each in found} >= set(range(5 if "chain" in options else 3))
    # Qwen's norms multiply by 1 + weight, and its recurrent layers round differently in steps and in one forward.
    assert mtp.worst(found, target.model) < (1e-3 if name.startswith("qwen") else MOST_ERROR)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "modules"), [("glm4_moe", 3), ("glm4_moe", 1), ("deepseek_v3", 2)])
def test_chains_are_those_of_transformers(
    name: str, modules: int, models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, theirs = models(name, modules), dict[tuple[int, ...], list[int]]()
    get = MTPCandidateGenerator.get_candidates

    def recorded(self: Any, ids: Any, *args: Any, **options: Any) -> Any:
        found = get(self, ids, *args, **options)
        theirs[tuple(ids[0].tolist())] = found[0][0, ids.shape[1] :].tolist()
        return found

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", recorded)
    for prompt in PROMPTS:
        options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
        target.model.generate(torch.tensor([prompt]), use_mtp=True, **options)
    ours = heads.recording(monkeypatch)
    texts(LLM(target, drafter="head", head="mtp", depth=modules, nodes=modules, chain=True))
    best = {(each.tokens, each.path): max(each.candidates, key=each.candidates.__getitem__) for each in ours}
    compared = 0
    for tokens, chain in theirs.items():
        if not chain:
            continue  # before the model's first forward
        own: list[int] = []
        while (tokens, tuple(own)) in best and len(own) < modules:
            own.append(best[tokens, tuple(own)])
        assert own == chain[: len(own)]
        compared += len(own)
    assert compared > 20 * modules


@pytest.mark.slow
def test_long_prompts_are_read_in_chunks(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leapahead.drafters.sources.head.CHUNK", 3)
    target, found = models("glm4_moe", 3), heads.recording(monkeypatch)
    assert texts(LLM(target, drafter="head", head="mtp", depth=3, nodes=6, prefill_chunk=4)) == plain(target)
    assert mtp.worst(found, target.model) < MOST_ERROR


@pytest.mark.slow
def test_the_beginning_of_a_prompt_is_not_read_again(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    target, found = models("glm4_moe", 3), heads.recording(monkeypatch)
    llm = LLM(target, drafter="head", head="mtp", depth=3, nodes=6, drafter_cache=False)
    first = llm.generate(PROMPTS[0], max_new_tokens=12, ignore_eos=True)
    tokens = first.prompt_tokens + first.tokens
    following = [*tokens[:-3], 50, 51, 52, 53]
    found.clear()
    again = llm.generate(following, max_new_tokens=12, ignore_eos=True)
    assert again.stats.reused_tokens >= len(tokens) - 6
    plainly = LLM(target, drafter="plain").generate(following, max_new_tokens=12, ignore_eos=True)
    assert again.tokens == plainly.tokens
    assert mtp.worst(found, target.model) < MOST_ERROR


# ------------------------------------------------------------------------------------------------------ the texts


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_text_changes_in_auto_with_penalties(temperature: float, models: Any) -> None:
    target = models("glm4_moe", 3)
    given = {"temperature": temperature, "repetition_penalty": 1.2, "bad_words": [[9]]}
    assert texts(LLM(target, head="mtp", nodes=10, max_batch=2), **given) == plain(target, **given)


# --------------------------------------------------------------------------------------------------- the mistakes


def shifted(patch: pytest.MonkeyPatch) -> None:
    """Every row reads the token before its own."""
    part = RowHead._part

    def wrong(self: Any, text: Any, paths: Any, most: int) -> Any:
        found = part(self, text, paths, most)
        if found.paths and found.paths[0]:
            return found
        return found._replace(tokens=text.tokens[found.begin :][: len(found.tokens)])

    patch.setattr(RowHead, "_part", wrong)


def of_the_same_module(patch: pytest.MonkeyPatch) -> None:
    """Nodes read what their parents' own module gave instead of the one before."""
    patch.setattr(our_mtp, "_of_nodes", lambda part, layer, count: part.states[:, layer])


def stale(patch: pytest.MonkeyPatch) -> None:
    """Rows of drafted nodes stay in the cache instead of being computed from the target's states."""

    def append(self: Any, states: Any) -> None:
        kept = min(len(states) - 1, len(self.nodes))
        self.known += len(states)
        self.length += kept
        self._waiting.append(states[kept:])

    patch.setattr(RowText, "append", append)


def without_the_last_norm(patch: pytest.MonkeyPatch) -> None:
    row = our_mtp.Mtp.row

    def wrong(self: Any, *args: Any) -> Any:
        for layer in self.layers:
            layer.use_post_norm = False
        return row(self, *args)

    patch.setattr(our_mtp.Mtp, "row", wrong)


@pytest.mark.slow
@pytest.mark.parametrize("mistake", [shifted, of_the_same_module, stale, without_the_last_norm])
def test_mistakes_are_found(mistake: Any, models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    target = models("glm4_moe", 3)
    found = heads.recording(monkeypatch)
    mistake(monkeypatch)
    assert texts(LLM(target, head="mtp", nodes=40)) == plain(target)
    assert mtp.worst(found, target.model) > 1e-2


# ----------------------------------------------------------------------------------- the format of speculators


DECODER = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
PUBLISHED = {"enorm": "token_layernorm", "hnorm": "hidden_layernorm", "eh_proj": "input_proj"}
PUBLISHED["post_norm"] = "final_layernorm"


def of_speculators(folder: Path, vocabulary: int, **changes: Any) -> tuple[Path, Any]:
    """A folder with a head of kind `mtp`, and its layer."""
    layer = MtpLayer(Qwen3Config(**DECODER, attn_implementation="eager"), Qwen3DecoderLayer, Qwen3RMSNorm, 0).double()
    torch.manual_seed(4)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    tensors = {}
    for name, tensor in layer.state_dict().items():
        part, _, rest = name.partition(".")
        tensors[f"mtp_layers.0.{PUBLISHED[part]}.{rest}" if part in PUBLISHED else f"mtp_layers.0.{rest}"] = tensor
    config = {TYPE: "mtp", "transformer_layer_config": {**DECODER, "vocab_size": vocabulary}, **changes}
    checkpoint.write(folder, config, tensors)
    return folder, layer.eval()


@torch.no_grad()
def expected(model: Any, layer: Any, computed: heads.Computed) -> Any:
    """The logits after a path, by the layer alone over the whole text."""
    tokens, path = computed.tokens, computed.path
    states = model(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states[-1]
    rotary = Qwen3RotaryEmbedding(layer.config)
    for end in range(len(path) + 1):
        ids = torch.tensor([[*tokens[1:], *path[:end]]])
        at = torch.arange(ids.shape[1])[None]
        mask = torch.full((ids.shape[1],) * 2, -1e30, dtype=torch.float64).triu(1)[None, None]
        embedded = model.get_input_embeddings()(ids)
        found = layer(embedded, states, rotary(embedded, at), mask, at, None)
        states = torch.cat((states, found[:, -1:]), dim=1)
    return model.get_output_embeddings()(found[0, -1]).numpy()


@pytest.mark.slow
def test_the_format_of_speculators(
    tiny_folder: Path, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float64)
    folder, layer = of_speculators(tmp_path, model.config.vocab_size)
    found = heads.recording(monkeypatch)
    llm = LLM(model, tokenizer=tokenizer, drafter="head", head=str(folder), depth=3, nodes=9)
    assert texts(llm) == texts(LLM(model, tokenizer=tokenizer, drafter="plain"))
    assert {len(each.path) for each in found} >= {0, 1, 2}
    for each in found[::8]:
        logits = expected(model, layer, each)[[*each.candidates]]
        values = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        assert np.abs(values - np.array([*each.candidates.values()])).max() < MOST_ERROR


# ------------------------------------------------------------------------------------------------------ refusals


def test_models_without_modules_are_refused(tiny_model: Any, tokenizer: Any, models: Any, tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"no MTP modules that Transformers loads: its configuration \(llama\)"):
        LLM(tiny_model, tokenizer=tokenizer, head="mtp")
    models("glm4_moe", 1)  # so that Transformers knows the numbers of the layers
    with pytest.MonkeyPatch.context() as patch:
        empty = mtp.load(mtp.write(tmp_path / "empty", "glm4_moe", 1, complete=False), patch)
        with pytest.raises(Refused, match=r"cannot be loaded, .*missing"):
            LLM(empty, head="mtp")
    made = type(empty)(copy.deepcopy(empty.config))
    made.config.name_or_path = ""
    with pytest.raises(Refused, match="was not loaded from a checkpoint"):
        LLM(made, head="mtp")


def test_other_targets_and_layers_are_refused(tmp_path: Path, tiny_model: Any, tokenizer: Any) -> None:
    with pytest.raises(Refused, match="needs hidden from the target"):
        LLM(ToyTarget(), head="mtp")
    with pytest.raises(Refused, match=r"of a model of Transformers, which .* is not"):
        LLM(ToyTarget(capabilities=ALL), head="mtp")
    config = LlamaConfig(num_hidden_layers=1, layer_types=["linear_attention"])
    with pytest.raises(Refused, match="layers of type 'linear_attention' are not supported"):
        our_mtp.Mtp(config, torch.nn.ModuleList([torch.nn.Linear(1, 1)]), None, None, None)
    vocabulary = tiny_model.config.vocab_size
    for changes, words in (
        ({"num_nextn_predict_layers": 2}, "has 2 MTP modules"),
        ({"transformer_layer_config": {**DECODER, "vocab_size": vocabulary, "model_type": "mamba"}}, "'mamba', which"),
    ):
        folder, _ = of_speculators(tmp_path / words.split()[0].strip("',"), vocabulary, **changes)
        with pytest.raises(Refused, match=words):
            LLM(tiny_model, tokenizer=tokenizer, head=str(folder))
    folder, _ = of_speculators(tmp_path / "wide", vocabulary + 1)
    with pytest.raises(BadParameter, match="expects a vocabulary of"):
        LLM(tiny_model, tokenizer=tokenizer, head=str(folder))


@pytest.mark.slow
def test_a_gguf_file_has_no_modules() -> None:
    pytest.importorskip("llama_cpp")
    import gguf_models

    with pytest.raises(Refused, match=r"of a model of Transformers, which .* is not"):
        LLM(gguf_models.llama(), head="mtp")


def test_the_model_that_they_belong_to_is_left_as_it_is(models: Any) -> None:
    target = models("glm4_moe", 1)
    model = target.model
    model.lm_head.weight.requires_grad_(True)
    before = model.config._attn_implementation
    LLM(target, head="mtp")
    assert model.lm_head.weight.requires_grad
    assert model.config._attn_implementation == before


@pytest.mark.skipif(not linears.can_pack(), reason="this processor's bfloat16 is not oneDNN's")
@pytest.mark.parametrize("name", ["glm4_moe", pytest.param("mellum", marks=pytest.mark.slow)])
def test_modules_of_a_packed_model_are_packed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = mtp.load(mtp.write(tmp_path / name, name, 1), monkeypatch).to(torch.bfloat16).eval()
    assert packing.packed(model)
    llm = LLM(model, drafter="head", head="mtp", nodes=4)
    (drafting,) = llm.engine.drafter("head", head="mtp").draft_forwards.models
    layers = drafting.head.module.layers
    assert linears.is_packed(layers)
    assert not any(type(each) is torch.nn.Linear for each in layers.modules())
    assert texts(llm) == plain(llm.target)
