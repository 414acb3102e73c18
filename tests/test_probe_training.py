"""Training of probes: the losses of PaSS and SPACE, what is trained and what is not, the commands."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402
from training_parts import QUIET, model_of, stopping, texts_of  # noqa: E402

from leapahead import LLM  # noqa: E402
from leapahead.bench.conditions import silent  # noqa: E402
from leapahead.core.errors import LeapaheadError  # noqa: E402
from leapahead.models import loading  # noqa: E402
from leapahead.models.transformers import linears  # noqa: E402
from leapahead.training import decoding, probe_run  # noqa: E402
from leapahead.training.batches import Order  # noqa: E402
from leapahead.training.loop import Training  # noqa: E402
from leapahead.training.probes import ProbeRecipe, masked_executor  # noqa: E402
from leapahead.training.settings import ProbeSettings  # noqa: E402
from leapahead.training.texts import Text  # noqa: E402

PROMPTS = ["def add(a, b):", "The quick brown", "for number in", "print(number,", "jumps over", "return a + b"]


@pytest.fixture(scope="module")
def texts() -> list[Text]:
    return texts_of(model_of())


def settings_of(kind: str, **more: Any) -> ProbeSettings:
    given = {"data": "prompts.jsonl", "steps": 30, "batch": 8, "lr": 3e-3, "depths": 3, **more}
    return ProbeSettings(kind=kind, **given).complete(32)


def made(kind: str, texts: list[Text], path: Path, **more: Any) -> tuple[ProbeRecipe, Training, Any]:
    target = loading.load(model_of()).target
    settings = settings_of(kind, **more)
    own = ProbeRecipe(target.model if kind == "pass" else model_of(), masked_executor(target), settings)
    order = Order(texts, settings.batch, settings.seed)
    return own, Training(own, order, own.batch, settings, path), target


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pass", "space"])
def test_the_loss_is_that_of_every_group_alone(kind: str, texts: list[Text], tmp_path: Path) -> None:
    """Without a tree: the text up to a place with the probes behind it, beside the text's own predictions."""
    weights = {"ar_weight": 2.0} if kind == "space" else {}
    own, _, _ = made(kind, texts, tmp_path / "checkpoint", groups=1000, **weights)
    some = [texts[4], replace(texts[9], answer=texts[9].answer[:5])]
    weight = own.module.embeddings.weight.detach()
    rows = weight if kind == "pass" else weight.expand(3, -1)
    losses: list[list[float]] = [[], [], []]
    right: list[list[bool]] = [[], [], []]
    text_losses = []
    with torch.no_grad():
        embedding = own.model.get_input_embeddings()
        for text in some:
            tokens = text.tokens
            logp = own.model(torch.tensor([tokens])).logits[0].log_softmax(-1)
            text_losses += [-logp[at, tokens[at + 1]].item() for at in range(len(text.prompt) - 1, len(tokens) - 1)]
            for place in range(len(text.prompt) - 1, len(tokens) - 2):
                own_rows = embedding(torch.tensor(tokens[: place + 1]))
                found = (
                    own.model(inputs_embeds=torch.cat((own_rows, rows))[None]).logits[0, place + 1 :].log_softmax(-1)
                )
                for depth in range(min(3, len(tokens) - 2 - place)):
                    p = logp[place + 1 + depth]
                    losses[depth].append(-(p.exp() * found[depth]).sum().item())
                    right[depth].append(found[depth].argmax().item() == tokens[place + 2 + depth])
    expected = sum(0.8**depth * np.mean(each) for depth, each in enumerate(losses))
    if kind == "space":
        expected += 2.0 * np.mean(text_losses)
    found_loss = own.loss(some)
    assert found_loss.loss.item() == pytest.approx(expected, rel=1e-4)
    assert found_loss.agreement.tolist() == pytest.approx([np.mean(each) for each in right])


@pytest.mark.slow
def test_pass_trains_the_embeddings_alone(texts: list[Text], tmp_path: Path) -> None:
    own, training, target = made("pass", texts, tmp_path / "checkpoint", steps=60, lr=2e-2)
    before = {name: each.clone() for name, each in target.model.named_parameters()}
    assert list(own.parameters) == ["embeddings.weight"]
    assert own.parameters["embeddings.weight"].shape == (3, 32)
    points = training.run(QUIET).points
    assert points[-1][1] < points[0][1]
    assert all(torch.equal(each, before[name]) for name, each in target.model.named_parameters())
    probe_run.write(own, tmp_path / "head", "tiny", target)
    (found,) = decoding.evaluations(
        target, None, {"all": texts[:8]}, silent, "", drafter="head", head=tmp_path / "head"
    )
    assert found.tree > 1.0
    assert (found.texts, len(found.depths)) == (8, 5)


@pytest.mark.slow
def test_space_predicts_more_than_pass_and_its_texts_are_its_own(texts: list[Text], tmp_path: Path) -> None:
    few = texts[:6]
    lengths = {}
    for kind in ("pass", "space"):
        own, training, target = made(kind, few, tmp_path / kind, steps=60, lr=5e-3)
        training.run(QUIET)
        drafted_for = target if kind == "pass" else loading.load(own.module.model.eval()).target
        probe_run.write(own, tmp_path / f"{kind}-head", "tiny", target)
        given = {"drafter": "head", "head": tmp_path / f"{kind}-head"}
        (found,) = decoding.evaluations(drafted_for, None, {"all": few}, silent, "", **given)
        lengths[kind] = found.tree
        llm = LLM(drafted_for, **given, nodes=8)
        for text in few:
            plain = llm.generate(text.prompt, max_new_tokens=20, drafter="plain")
            assert llm.generate(text.prompt, max_new_tokens=20).tokens == plain.tokens
        if kind == "space":
            (changed,) = probe_run.losses(target, drafted_for, {"all": few, "none": []})
            assert changed.answers[1] < changed.answers[0]
    assert lengths["space"] > lengths["pass"] + 0.2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pass", "space"])
def test_a_resumed_training_is_the_same(kind: str, texts: list[Text], tmp_path: Path) -> None:
    given: dict[str, Any] = {"steps": 4, "accumulate": 2, "groups": 3}
    whole, training, _ = made(kind, texts, tmp_path / "whole", **given)
    training.run(QUIET)
    _, first, _ = made(kind, texts, tmp_path / "parts", **given)
    assert first.run(replace(QUIET, interrupts=stopping(2))).step == 2
    resumed, second, _ = made(kind, texts, tmp_path / "parts", **given)
    assert second.run(QUIET).loss == training.state.loss
    for name, each in whole.parameters.items():
        assert torch.equal(each, resumed.parameters[name]), name


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kind": "medusa"}, "kind='medusa' is not possible; choose one of pass, space"),
        ({"depths": 0}, "depths=0 is not possible: it must be from 1 to 256"),
        ({"groups": 0}, "groups=0 is not possible: it must be at least 1"),
        ({"ar_weight": -1.0}, r"ar_weight=-1\.0 is not possible"),
        ({"loss": "l2"}, "loss='l2' is not possible"),
        ({"ar_weight": 5.0}, "ar_weight=5.0 is not possible with pass, which does not read it"),
    ],
)
def test_impossible_settings(given: dict[str, Any], message: str) -> None:
    with pytest.raises(LeapaheadError, match=message):
        ProbeSettings(**{"data": "a", **given})


def test_other_targets_are_refused_by_name() -> None:
    from leapahead.models.toy import ToyTarget

    with pytest.raises(LeapaheadError, match="takes tree masks and embeddings; train a draft model"):
        masked_executor(ToyTarget(8))


@pytest.mark.slow
@pytest.mark.skipif(not linears.can_pack(), reason="this processor's bfloat16 is not oneDNN's")
def test_embeddings_for_a_packed_target_are_trained(tiny_folder: Path, tmp_path: Path) -> None:
    """oneDNN's product with a packed weight has no gradient."""
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    settings = ProbeSettings("pass", data=str(data), steps=3, batch=2, lr=0.1, depths=2, held_out=0, max_new_tokens=8)
    llm = LLM(str(tiny_folder), dtype="bfloat16")
    target: Any = llm.target
    assert linears.is_packed(target.model)
    probe_run.train_probes(llm, settings, tmp_path / "run", QUIET)
    fresh = ProbeRecipe(target.model, masked_executor(target), settings.complete(32)).module.embeddings.weight
    written = load_file(tmp_path / "run" / "head" / "model.safetensors")["embeddings.weight"]
    assert written.dtype == torch.bfloat16
    assert not torch.equal(written, fresh.to(torch.bfloat16))


@pytest.mark.slow
def test_the_commands_train_and_their_results_draft(leapahead: Any, tmp_path: Path) -> None:
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    few = ("--max-new-tokens", "8", "--steps", "2", "--batch", "2", "--held-out", "0.3", "--depths", "2")
    first = ("train-probes", "--kind", "pass", "--data", str(data), "--out", str(tmp_path / "one"), *few)
    result = leapahead(*first)
    assert result.exit_code == 0, result.stderr
    head = tmp_path / "one" / "head"
    assert "PaSS (2311.13581)" in (head / "README.md").read_text()
    assert json.loads((head / "config.json").read_text())["num_probes"] == 2
    text = leapahead("generate", "def add", "--max-new-tokens", "8", "--head", str(head), "--json")
    assert "pass" in json.loads(text.stdout)["stats"]["drafter"]

    texts = str(tmp_path / "one" / "texts.jsonl")
    second = ("train-probes", "--kind", "space", "--texts", texts, "--out", str(tmp_path / "two"), *few[2:])
    result = leapahead(*second)
    assert result.exit_code == 0, result.stderr
    assert "lossless with respect to the tuned model" in result.stdout
    folder = tmp_path / "two" / "tuned"
    readme = (folder / "README.md").read_text()
    assert "lossless with respect to the tuned model" in readme
    assert "Loss of the prompts, before | after" in readme
    found = json.loads(leapahead(*second, "--resume", "--json").stdout)
    assert (found["tuned"], len(found["losses"])) == (str(folder), 1)
    note = f"Lossless with respect to the tuned model: {folder} was tuned from bundled, whose texts are others."
    text = leapahead("generate", "a", "--max-new-tokens", "8", "-m", str(folder), "--head", str(folder / "probes"))
    assert note in text.stderr
