"""Peers: refused by name where they cannot run, timed as ours are, and their texts are plain decoding's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import seq2seq
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from leapahead import BadParameter, Refused
from leapahead.bench import peers
from leapahead.bench.cell import measure_cell, tie_on
from leapahead.bench.contender import Ours, Setting
from leapahead.bench.peers.transformers import Assisted, Generate, Greedy, PromptLookup
from leapahead.inputs import encode
from leapahead.models import loading
from leapahead.models.loading import Loaded
from leapahead.models.toy import ToyTarget
from leapahead.models.transformers.encoder_decoder import EncoderDecoderTarget

TEXTS = ["def add(a, b):\n    return a + b\n\n\ndef add_all(", "Two and two are", "x = [1, 2, 3]\ny = [1, 2,"]


@pytest.fixture(scope="module")
def entry() -> peers.Entry:
    return peers.Entry(loading.load(dtype="float32"))


@pytest.fixture(scope="module")
def prompts(entry: peers.Entry) -> list[list[int]]:
    return [encode(text, entry.loaded.tokenizer, entry.loaded.target.info) for text in TEXTS]


def row_of(peer: peers.Peer, entry: peers.Entry, prompts: Sequence[list[int]], setting: Setting) -> dict[str, Any]:
    loaded = entry.loaded
    plain = Ours("plain", loaded.target, loaded.tokenizer, "plain")
    other = peer.enter("peer:x", entry)
    assert other.refusal(prompts, setting) is None
    return measure_cell([plain, other], prompts, setting, rounds=1, seed=0, judge=tie_on(loaded.target))[1]


@pytest.mark.slow
@pytest.mark.parametrize("peer", [Greedy(), PromptLookup(), PromptLookup(3), Assisted()], ids=lambda peer: peer.label)
def test_transformers_writes_our_text_and_is_timed_without_its_prefill(
    entry: peers.Entry, prompts: list[list[int]], peer: peers.Peer
) -> None:
    row = row_of(peer, entry, prompts, Setting(max_new_tokens=24))
    assert row["mismatches"] == row["ties"] == 0
    if isinstance(peer, Greedy) and type(peer) is Greedy:
        assert row["tokens"] == row["steps"] == row["nodes"] == 3 * 23  # the first token came with the prefill
        assert row["forwards"] == 24 * 4  # one pass of three, and the warm-up of one
    else:
        assert 1 < row["acceptance_length"] < 24
        assert row["nodes_per_step"] > 2
        assert 0 < row["tokens"] <= 3 * 23
    assert row["time_to_first_token"] > 0
    assert 0 < row["seconds"]["prefill"] < row["seconds"]["prefill"] + row["seconds"]["rest"]


@pytest.mark.slow
def test_transformers_ends_where_we_do_and_pads_a_batch(entry: peers.Entry, prompts: list[list[int]]) -> None:
    plain = Ours("plain", entry.loaded.target, entry.loaded.tokenizer, "plain")
    whole = plain.run(prompts, Setting(max_new_tokens=24)).texts
    end = whole[0].tokens[9]
    for peer, batch in ((Greedy(), 1), (Greedy(), 2), (Greedy(), 3), (PromptLookup(), 1), (Assisted(), 1)):
        setting = Setting(max_new_tokens=24, batch=batch, eos_token_ids=(end,))
        row = row_of(peer, entry, prompts, setting)
        assert row["mismatches"] == row["ties"] == 0
        assert row["tokens"] <= 23 * 3 - 14


def test_what_transformers_cannot_do_is_refused(entry: peers.Entry, prompts: list[list[int]], tmp_path: Path) -> None:
    greedy, lookup = Greedy().enter("peer:x", entry), PromptLookup().enter("peer:y", entry)
    assert "random numbers" in str(greedy.refusal(prompts, Setting(temperature=1.0)))
    assert greedy.refusal(prompts, Setting(batch=2)) is None
    assert "single sequences" in str(lookup.refusal(prompts, Setting(batch=2)))
    with pytest.raises(Refused, match="Transformers cannot run toy"):
        Greedy().enter("peer:x", peers.Entry(Loaded(ToyTarget(), None, ())))
    with pytest.raises(BadParameter, match="is not a folder"):
        Assisted(str(tmp_path / "none"))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(Refused, match="64 tokens"):
        Assisted(str(tmp_path)).enter("peer:x", entry)


@pytest.mark.parametrize("peer", [Greedy(), PromptLookup(), Assisted()], ids=lambda peer: peer.label)
def test_encoder_decoder_models_are_refused(peer: peers.Peer) -> None:
    target = EncoderDecoderTarget(seq2seq.build("t5"), name="t5")
    with pytest.raises(Refused, match="only decoder-only models are compared with it, which t5 is not"):
        peer.enter("peer:x", peers.Entry(Loaded(target, None, ())))


@pytest.mark.slow
def test_a_penalty_of_the_models_own_does_not_apply(entry: peers.Entry, prompts: list[list[int]]) -> None:
    model: Any = entry.loaded.target.model  # type: ignore[attr-defined]
    before = model.generation_config
    config = type(before)(**{**before.to_dict(), "repetition_penalty": 3.0, "no_repeat_ngram_size": 2})
    model.generation_config = config
    try:
        row = row_of(Greedy(), entry, prompts, Setting(max_new_tokens=24))
    finally:
        model.generation_config = before
    assert row["mismatches"] == 0


@pytest.mark.slow
def test_a_wrong_draft_would_be_seen(entry: peers.Entry, prompts: list[list[int]]) -> None:
    """The comparison can fail: a model that writes something else is a mismatch."""
    loaded = entry.loaded
    model: Any = loaded.target.model  # type: ignore[attr-defined]
    torch.manual_seed(0)
    other = LlamaForCausalLM(
        LlamaConfig(
            **{**model.config.to_dict(), "num_hidden_layers": 1, "layer_types": None},
        )
    ).eval()
    plain = Ours("plain", loaded.target, loaded.tokenizer, "plain")
    setting = Setting(max_new_tokens=8)
    rows = measure_cell(
        [plain, Generate("peer:x", other, {})], prompts, setting, rounds=1, seed=0, judge=tie_on(loaded.target)
    )
    assert rows[1]["mismatches"] == len(prompts)


@pytest.mark.parametrize("trees", [True, False])
def test_openvino_genai_does_not_find_the_prompts_of_an_earlier_round(
    monkeypatch: pytest.MonkeyPatch, trees: bool
) -> None:
    """Its pipeline keeps the blocks of prompts by default; the backend without blocks takes no such setting."""
    genai = pytest.importorskip("openvino_genai")
    from leapahead.bench.peers import openvino

    given: list[dict[str, Any]] = []
    monkeypatch.setattr(genai, "LLMPipeline", lambda *where, **settings: given.append(settings))
    model = SimpleNamespace(trees=trees, computed_in="f32", cached_in="f32", threads=1, file=Path("model/x.xml"))
    openvino.Generate("peer:x", SimpleNamespace(model=model), "PA", "", {}, {})  # type: ignore[arg-type]
    assert given[0]["ATTENTION_BACKEND"] == ("PA" if trees else "SDPA")
    assert ("scheduler_config" in given[0]) == trees
    if trees:
        scheduling = given[0]["scheduler_config"]
        assert not scheduling.enable_prefix_caching
        assert scheduling.max_num_batched_tokens > 10**9  # a prompt is read in one forward, as without the setting


# ------------------------------------------------------------------------------------------------------- configured


def test_peers_by_name_and_options() -> None:
    found = peers.configured(["transformers", "transformers-prompt-lookup:num_tokens=4", "transformers-assisted:"])
    assert [peer.label for peer in found] == [
        "transformers",
        "transformers-prompt-lookup(num_tokens=4)",
        "transformers-assisted",
    ]
    assert found[1] == replace(PromptLookup(), num_tokens=4)
    assert all(peer.version().startswith("transformers 5") for peer in found)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("transformer", r"no peer 'transformer' \(did you mean 'transformers'\?\); there are transformers, "),
        ("zzz", "there are transformers, transformers-prompt-lookup"),
        ("transformers-prompt-lookup:tokens=4", "'tokens=4' is not an option .* there are: num_tokens="),
        ("transformers-prompt-lookup:num_tokens=x", "num_tokens must be a whole number"),
        ("transformers:x", "'x' is not an option of transformers; there are: none"),
        ("llama-lookup", "needs path=..."),
        ("llama-lookup:path=/nowhere/llama-lookup", "/nowhere/llama-lookup does not exist"),
    ],
)
def test_what_is_no_peer(text: str, message: str) -> None:
    with pytest.raises(BadParameter, match=message):
        peers.configured([text])


def test_every_name_is_that_of_its_class() -> None:
    from importlib import import_module

    for name, (module, kind) in peers.PEERS.items():
        assert getattr(import_module(f"leapahead.bench.peers.{module}"), kind).name == name
