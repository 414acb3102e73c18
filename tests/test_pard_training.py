"""Training of draft models with mask tokens (PARD): the loss, the masks that are dropped, what it brings."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from training_parts import QUIET, model_of, small_model, stopping, texts_of, trained_chains  # noqa: E402

from leapahead import LLM  # noqa: E402
from leapahead.core.errors import BadParameter, LeapaheadError, Refused  # noqa: E402
from leapahead.models import loading  # noqa: E402
from leapahead.training import pard  # noqa: E402
from leapahead.training.batches import Order  # noqa: E402
from leapahead.training.loop import Training  # noqa: E402
from leapahead.training.pard import MASKS, PardRecipe  # noqa: E402
from leapahead.training.settings import DIVERGENCES, DraftSettings  # noqa: E402
from leapahead.training.student import Student  # noqa: E402
from leapahead.training.texts import Text  # noqa: E402

MASK = 63
PROMPTS = ["def add(a, b):", "The quick brown", "for number in", "print(number,"]


@pytest.fixture(scope="module")
def target() -> Any:
    return loading.load(model_of()).target


@pytest.fixture(scope="module")
def texts() -> list[Text]:
    return texts_of(model_of())


def made(target: Any, texts: list[Text], path: Path, model: Any = None, **more: Any) -> tuple[PardRecipe, Training]:
    given = {"kind": "pard", "data": "prompts.jsonl", "steps": 60, "batch": 8, "lr": 1e-2, **more}
    settings = DraftSettings(**given).complete(16)
    student = Student(small_model() if model is None else model, None, torch.float32, "small")
    own = PardRecipe(student, target, settings, (), pard.executor_of(student), MASK)
    order = Order(texts, settings.batch, settings.seed)
    return own, Training(own, order, own.batch, settings, path, own.batch(texts[:4]))


@pytest.mark.slow
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_the_loss_is_that_of_every_chain_of_masks_alone(
    divergence: str, target: Any, texts: list[Text], tmp_path: Path
) -> None:
    """Without a tree: the text up to a place with the masks behind it, against what the target predicts there."""
    own, _ = made(target, texts, tmp_path / "checkpoint", divergence=divergence, retention=1.0)
    some = [texts[4], replace(texts[9], answer=texts[9].answer[:4])]
    losses: list[list[float]] = [[] for _ in range(MASKS + 1)]
    right: list[list[bool]] = [[] for _ in range(MASKS + 1)]
    with torch.no_grad():
        for text in some:
            tokens = text.tokens
            p = target.model(torch.tensor([tokens])).logits[0]
            for place in range(len(text.prompt) - 1, len(tokens) - 1):
                masks = min(MASKS, len(tokens) - 2 - place)
                q = own.module(torch.tensor([[*tokens[: place + 1], *[MASK] * masks]])).logits[0, place:]
                goals = torch.tensor(tokens[place + 1 : place + 2 + masks])
                found = own.divergence(q, p[place : place + 1 + masks], goals)
                for depth, (loss, best) in enumerate(zip(found.tolist(), q.argmax(-1), strict=True)):
                    losses[depth].append(loss)
                    right[depth].append(bool(best == goals[depth]))
    loss = own.loss(own.batch(some))
    assert loss.loss.item() == pytest.approx(np.mean([one for each in losses for one in each]), rel=1e-4)
    assert loss.agreement.tolist() == pytest.approx([np.mean(each) for each in right])


def test_later_masks_are_kept_at_fewer_places(target: Any, tmp_path: Path) -> None:
    text = Text(0, [1, 2, 3], list(range(1, 42)) + list(range(1, 41)) + [7] * 20)
    own, _ = made(target, [text] * 8, tmp_path / "checkpoint", retention=0.5, least_retention=0.1)
    tree = own.tree(text, torch.Generator().manual_seed(0))
    lengths = Counter(len(ids) for _, ids in tree.probes)
    kept = [sum(count for length, count in lengths.items() if length >= depth) for depth in range(1, MASKS + 1)]
    assert kept[:3] == [50, 25, 12]
    assert all(8 <= each <= 10 for each in kept[3:])  # the text ends within some of the chains
    places = [node for node, _ in tree.probes]
    assert min(places) >= 2
    assert len(set(places)) == len(places)
    assert all(node + len(ids) < len(text.tokens) for node, ids in tree.probes)
    other = own.tree(text, torch.Generator().manual_seed(1))
    assert [node for node, _ in other.probes] != places


@pytest.mark.slow
def test_the_mask_is_a_token_that_no_text_has(texts: list[Text]) -> None:
    student = Student(small_model(), None, torch.float32, "small")
    used = {token for text in texts for token in text.tokens}
    assert pard.mask_token(student, texts, ()) == max(set(range(64)) - used)
    assert pard.mask_token(student, [Text(0, [63, 62], [60])], (61,)) == 59
    with pytest.raises(BadParameter, match="the texts have every token of small, so none can be the mask"):
        pard.mask_token(student, [Text(0, list(range(64)), [1])], ())
    student.model.config.pard_token = 5
    assert pard.mask_token(student, [Text(0, [5], [5])], ()) == 5


@pytest.mark.slow
def test_a_resumed_training_is_the_same(target: Any, texts: list[Text], tmp_path: Path) -> None:
    given: dict[str, Any] = {"steps": 4, "accumulate": 2, "on_policy": 0.5}
    whole, training = made(target, texts, tmp_path / "whole", **given)
    training.run(QUIET)
    _, first = made(target, texts, tmp_path / "parts", **given)
    assert first.run(replace(QUIET, interrupts=stopping(2))).step == 2
    resumed, second = made(target, texts, tmp_path / "parts", **given)
    assert second.run(QUIET).loss == training.state.loss
    for name, each in whole.parameters.items():
        assert torch.equal(each, resumed.parameters[name]), name


@pytest.mark.slow
def test_one_forward_drafts_more_than_before_and_no_text_changes(
    target: Any, texts: list[Text], tmp_path: Path
) -> None:
    """The draft model has the target's weights, so what it lacks are the tokens below masks."""
    few = texts[:6]
    own, training = made(target, few, tmp_path / "checkpoint", model_of(), batch=6, lr=6e-3)
    own.module.config.pard_token = MASK
    student = Student(own.module, None, torch.float32, "")
    before, after, given = trained_chains(training, student, target, few, tmp_path)
    assert after > before + 0.5
    with LLM(model_of(), **given, nodes=8) as llm:
        for text in texts[:8]:
            assert llm.generate(text.prompt, max_new_tokens=20).tokens == text.answer


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kind": "eagle"}, "kind='eagle' is not possible; choose one of draft, pard"),
        ({"retention": 1.5}, "retention=1.5 is not possible: it must be from 0 to 1"),
        ({"least_retention": -1}, "least_retention=-1 is not possible"),
    ],
)
def test_impossible_settings(given: dict[str, Any], message: str) -> None:
    with pytest.raises(LeapaheadError, match=message):
        DraftSettings(**{"data": "a", **given})


def test_a_draft_model_without_tree_masks_is_refused() -> None:
    from transformers import MambaConfig, MambaForCausalLM

    model = MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=16, state_size=4, num_hidden_layers=1)).eval()
    with pytest.raises(Refused, match="small cannot be trained with mask tokens, which needs a model of Transformers"):
        pard.executor_of(Student(model, None, torch.float32, "small"))


@pytest.mark.slow
def test_the_command_trains_a_draft_model_that_drafts_with_masks(leapahead: Any, tmp_path: Path) -> None:
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    few = ("--max-new-tokens", "8", "--steps", "2", "--batch", "2", "--held-out", "0.3")
    given = ("train-draft", "--kind", "pard", "--draft", "bundled", "--data", str(data), "--out", str(tmp_path / "run"))
    result = leapahead(*given, *few)
    assert result.exit_code == 0, result.stderr
    folder = tmp_path / "run" / "draft"
    config = json.loads((folder / "config.json").read_text())
    assert config["pard_token"] == config["vocab_size"] - 1
    readme = (folder / "README.md").read_text()
    assert f"| Mask token | {config['pard_token']} |" in readme
    assert "PARD, 2504.18583" in readme
    text = leapahead("generate", "def add", "--max-new-tokens", "8", "-d", "draft_model", "--draft", str(folder))
    assert text.stdout == leapahead("generate", "def add", "--max-new-tokens", "8", "-d", "plain").stdout

    ordinary = ("train-draft", "--draft", str(folder), "--data", str(data), "--out", str(tmp_path / "ordinary"), *few)
    assert leapahead(*ordinary).exit_code == 0
    assert "pard_token" not in json.loads((tmp_path / "ordinary" / "draft" / "config.json").read_text())
