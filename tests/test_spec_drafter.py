"""Training of draft models of encoder-decoder models, with a block of masks (Spec-Drafter) and without."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from seq2seq import build  # noqa: E402
from training_parts import QUIET, model_of, stopping, trained_chains  # noqa: E402

from leapahead import LLM  # noqa: E402
from leapahead.core.errors import BadParameter, LeapaheadError, Refused  # noqa: E402
from leapahead.models import loading  # noqa: E402
from leapahead.models.transformers.weights import digest  # noqa: E402
from leapahead.training import draft_model  # noqa: E402
from leapahead.training.batches import Order  # noqa: E402
from leapahead.training.draft_run import train_draft  # noqa: E402
from leapahead.training.loop import Training  # noqa: E402
from leapahead.training.pard import MASKS  # noqa: E402
from leapahead.training.settings import DIVERGENCES, DraftSettings  # noqa: E402
from leapahead.training.spec_drafter import PLACES, SpecDrafterRecipe  # noqa: E402
from leapahead.training.student import Student  # noqa: E402
from leapahead.training.texts import Text  # noqa: E402

MASK = 3


def model(name: str, seed: int = 1) -> Any:
    """Without dropout, whose noise is not that of the training's seed; the T5 with distributions that are not flat."""
    options: dict[str, Any] = (
        {"dropout_rate": 0.0, "scale_decoder_outputs": False} if name == "t5" else {"dropout": 0.0}
    )
    return build(name, seed=seed, **options)


@pytest.fixture(scope="module")
def targets() -> dict[str, Any]:
    return {name: loading.load(model(name)).target for name in ("t5", "bart")}


@pytest.fixture(scope="module")
def texts(targets: dict[str, Any]) -> list[Text]:
    """Greedy texts of prompts of different lengths."""
    rng = np.random.default_rng(0)
    prompts = [[int(token) for token in rng.integers(13, 60, size)] for size in (5, 14, 3, 9, 6, 11, 4, 7)]
    with LLM(targets["t5"].model.model, drafter="plain") as llm:
        found = llm.generate(prompts, max_new_tokens=12)
    return [Text(number, each.prompt_tokens, each.tokens) for number, each in enumerate(found)]


def student_of(name: str = "t5", seed: int = 2) -> Student:
    return Student(model(name, seed), None, torch.float32, "small")


def made(
    target: Any, texts: list[Text], path: Path, student: Student, mask: int | None = MASK, **more: Any
) -> tuple[SpecDrafterRecipe, Training]:
    given = {"kind": "pard", "data": "prompts.jsonl", "steps": 60, "batch": 8, "lr": 5e-3, **more}
    settings = DraftSettings(**given).complete(32)
    own = SpecDrafterRecipe(student, target, settings, (), mask)
    order = Order(texts, settings.batch, settings.seed)
    return own, Training(own, order, own.batch, settings, path, own.batch(texts[:4]))


def logits_of(model: Any, source: list[int], tokens: list[int]) -> Any:
    with torch.no_grad():
        return model(input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([tokens])).logits[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t5", "bart"])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_the_loss_is_that_of_every_block_alone(
    name: str, divergence: str, targets: dict[str, Any], texts: list[Text], tmp_path: Path
) -> None:
    """Each source and block by itself, without padding, against what the target predicts there."""
    target = targets[name]
    own, _ = made(target, texts, tmp_path / "checkpoint", student_of(name), divergence=divergence)
    some = [texts[1], replace(texts[2], answer=texts[2].answer[:3])]
    start = list(target.info.decoder.start)
    losses: list[float] = []
    right: list[list[bool]] = [[] for _ in range(MASKS + 1)]
    blocks = own.blocks(some, torch.Generator().manual_seed(1))
    assert [number for number, *_ in blocks] == [0] * PLACES + [1] * 3
    for number, place, masks in blocks:
        text = some[number]
        p = logits_of(target.model.model, text.prompt, [*start, *text.answer[:-1]])
        q = logits_of(own.module, text.prompt, [*start, *text.answer[:place], *[MASK] * masks])
        assert place + masks == min(len(text.answer) - 1, place + MASKS)
        for row in range(place + masks + 1):
            goal = torch.tensor([text.answer[row]])
            losses.append(own.divergence(q[row : row + 1], p[row : row + 1], goal).item())
            right[max(0, row - place)].append(bool(q[row].argmax() == goal))
    found = own.loss(own.batch(some))
    assert found.loss.item() == pytest.approx(np.mean(losses), rel=1e-4)
    assert found.agreement.tolist() == pytest.approx([np.mean(each) if each else 0.0 for each in right])


def test_without_masks_every_row_of_a_text_counts_once(
    targets: dict[str, Any], texts: list[Text], tmp_path: Path
) -> None:
    own, _ = made(targets["t5"], texts, tmp_path / "checkpoint", student_of(), None, kind="draft", divergence="tvd")
    start, losses = list(targets["t5"].info.decoder.start), []
    for text in texts[:3]:
        inputs = [*start, *text.answer[:-1]]
        p, q = (logits_of(each, text.prompt, inputs).softmax(-1) for each in (targets["t5"].model.model, own.module))
        losses += (0.5 * (p - q).abs().sum(-1)).tolist()
    found = own.loss(own.batch(texts[:3]))
    assert found.loss.item() == pytest.approx(np.mean(losses), rel=1e-4)
    assert len(found.agreement) == 1


def test_places_are_drawn_anew_and_differ(targets: dict[str, Any], texts: list[Text], tmp_path: Path) -> None:
    own, _ = made(targets["t5"], texts, tmp_path / "checkpoint", student_of())
    one, again, other = (own.blocks(texts, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert one == again != other
    assert len(set(one)) == len(one) == sum(min(PLACES, len(text.answer)) for text in texts)


def test_a_resumed_training_is_the_same(targets: dict[str, Any], texts: list[Text], tmp_path: Path) -> None:
    whole, training = made(targets["t5"], texts, tmp_path / "whole", student_of(), steps=4)
    training.run(QUIET)
    _, first = made(targets["t5"], texts, tmp_path / "parts", student_of(), steps=4)
    assert first.run(replace(QUIET, interrupts=stopping(2))).step == 2
    resumed, second = made(targets["t5"], texts, tmp_path / "parts", student_of(), steps=4)
    assert second.run(QUIET).loss == training.state.loss
    for name, each in whole.parameters.items():
        assert torch.equal(each, resumed.parameters[name]), name


@pytest.mark.slow
def test_one_forward_drafts_more_than_before_and_no_text_changes(
    targets: dict[str, Any], texts: list[Text], tmp_path: Path
) -> None:
    """The draft model has the target's weights, so what it lacks are the tokens below masks."""
    target, student, few = targets["t5"], student_of(seed=1), texts[:3]
    own, training = made(target, few, tmp_path / "checkpoint", student, steps=100, lr=3e-3)
    own.module.config.pard_token = MASK
    before, after, given = trained_chains(training, student, target, few, tmp_path)
    assert after > before + 0.4
    with LLM(model("t5"), **given, nodes=8, depth=1) as llm:
        for text in texts:
            assert llm.generate(text.prompt, max_new_tokens=12).tokens == text.answer
        sampled = llm.generate(texts[0].prompt, max_new_tokens=12, temperature=1.0, seed=5).tokens
        plain = llm.generate(texts[0].prompt, max_new_tokens=12, temperature=1.0, seed=5, drafter="plain").tokens
        assert sampled == plain


def test_draft_models_of_another_kind_and_own_answers_are_refused(targets: dict[str, Any], tmp_path: Path) -> None:
    for folder, made_model in (("both", model("t5")), ("one", model_of())):
        made_model.save_pretrained(tmp_path / folder)
    with pytest.raises(Refused, match=r"is a decoder-only model and .* is an encoder-decoder model; use a draft model"):
        draft_model.load(str(tmp_path / "one"), targets["t5"], None)
    with pytest.raises(Refused, match=r"is an encoder-decoder model and .* is a decoder-only model; use a draft model"):
        draft_model.load(str(tmp_path / "both"), loading.load(model_of()).target, None)
    settings = DraftSettings(data="prompts.jsonl", draft=str(tmp_path / "both"), on_policy=0.5, steps=1)
    llm = LLM(targets["t5"], drafter="plain")
    with pytest.raises(BadParameter, match=r"on_policy=0\.5 is not possible with an encoder-decoder model"):
        train_draft(llm, settings, tmp_path / "run", QUIET)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_whole_run_writes_a_draft_model_and_its_card(tmp_path: Path) -> None:
    model("t5").save_pretrained(tmp_path / "target")
    model("t5", seed=2).save_pretrained(tmp_path / "start")
    texts = tmp_path / "texts.jsonl"
    llm = LLM(str(tmp_path / "target"), drafter="plain", dtype="float32")
    target: Any = llm.target
    prompts = [[20 + number, 30 + number, 13 + number] for number in range(8)]
    answers = llm.generate(prompts, max_new_tokens=10)
    head = {"weights": digest(target.model), "data": "prompts.jsonl"}
    rows = [
        {"index": number, "prompt": prompt, "answer": answer.tokens, "temperature": 0.0}
        for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]
    texts.write_text("".join(json.dumps(each) + "\n" for each in (head, *rows)))
    settings = DraftSettings(
        kind="pard", draft=str(tmp_path / "start"), texts=str(texts), steps=2, batch=4, held_out=0.25
    )
    found = train_draft(llm, settings, tmp_path / "run", QUIET)
    assert found.folder is not None
    config = json.loads((found.folder / "config.json").read_text())
    used = {0}.union(*prompts, *(answer.tokens for answer in answers))
    assert config["pard_token"] == max(set(range(config["vocab_size"])) - used)
    assert f"a block of {MASKS} masks stood at {PLACES} places of each text (SpecDec, 2203.16487)" in (
        found.folder / "README.md"
    ).read_text().replace("\n", " ")
    assert [each.name for each in found.evaluations] == ["held out, greedy"]


def test_settings_that_are_impossible() -> None:
    with pytest.raises(LeapaheadError, match="on_policy=2 is not possible"):
        DraftSettings(data="a", on_policy=2)
