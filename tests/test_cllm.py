"""Consistency tuning (CLLM): the loss is the paper's, Jacobi decoding gets longer, and reports say what is lossless."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import seq2seq  # noqa: E402
from training_parts import QUIET, model_of, stopping, texts_of  # noqa: E402

from leapahead import LLM  # noqa: E402
from leapahead.bench.conditions import silent  # noqa: E402
from leapahead.core.errors import LeapaheadError  # noqa: E402
from leapahead.models import loading  # noqa: E402
from leapahead.training import cllm, cllm_run, trajectories  # noqa: E402
from leapahead.training import texts as text_files  # noqa: E402
from leapahead.training.batches import Order  # noqa: E402
from leapahead.training.cllm import CllmRecipe, tree_of  # noqa: E402
from leapahead.training.loop import Training  # noqa: E402
from leapahead.training.run import gathered  # noqa: E402
from leapahead.training.settings import CllmSettings, Folder  # noqa: E402
from leapahead.training.student import Student  # noqa: E402
from leapahead.training.texts import Text  # noqa: E402
from leapahead.training.trajectories import Trajectory  # noqa: E402

BLOCK = 4
PROMPTS = ["def add(a, b):", "The quick brown", "for number in", "print(number,", "jumps over", "return a + b"]


@pytest.fixture(scope="module")
def target() -> Any:
    return loading.load(model_of()).target


@pytest.fixture(scope="module")
def texts() -> list[Text]:
    return texts_of(model_of())


@pytest.fixture(scope="module")
def recorded(target: Any, texts: list[Text], tmp_path_factory: pytest.TempPathFactory) -> list[Trajectory]:
    path = tmp_path_factory.mktemp("run") / "trajectories.jsonl"
    return trajectories.write(target, None, texts, BLOCK, 4, path, silent)


def settings_of(**more: Any) -> CllmSettings:
    given = {"data": "prompts.jsonl", "steps": 20, "batch": 8, "lr": 3e-3, "block": BLOCK, "ar_weight": 1.0, **more}
    return CllmSettings(**given).complete(32)


def made(target: Any, recorded: list[Trajectory], settings: CllmSettings, path: Path) -> Any:
    student = Student(model_of(), None, torch.float32, "tiny")
    own = CllmRecipe(student, cllm.masked_executor(target), settings, recorded, target.model)
    order = Order([each.text for each in recorded], settings.batch, settings.seed)
    return own, Training(own, order, own.batch, settings, path)


# --------------------------------------------------------------------------------------------- trajectories and loss


@pytest.mark.slow
def test_states_are_those_of_jacobi_decoding(target: Any, texts: list[Text], recorded: list[Trajectory]) -> None:
    llm = LLM(target, drafter="jacobi", block=BLOCK, drafter_cache=False)
    for text, each in zip(texts, recorded, strict=True):
        assert (each.index, each.prompt, each.answer) == (text.index, text.prompt, text.answer)
        steps = llm.generate(text.prompt, max_new_tokens=20).stats.steps
        assert steps - len(each.states) in (0, 1)  # with one token left to write, nothing is guessed
        assert [length for length, _ in each.states] == sorted(length for length, _ in each.states)
    length, guesses = recorded[3].states[-3]
    tokens = torch.tensor([[*(recorded[3].prompt + recorded[3].answer)[:length], *guesses]])
    with torch.no_grad():
        chosen = target.model(tokens).logits[0].argmax(-1)[length - 1 :].tolist()
    following, next_guesses = recorded[3].states[-2]
    kept = next_guesses[: len(chosen) - (following - length)]
    assert chosen[following - length :][: len(kept)] == kept  # the guesses of a step are the choices of the one before


@pytest.mark.slow
def test_trajectories_go_on(target: Any, texts: list[Text], recorded: list[Trajectory], tmp_path: Path) -> None:
    path = tmp_path / "trajectories.jsonl"
    assert trajectories.write(target, None, texts[:5], BLOCK, 4, path, silent) == recorded[:5]
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:2]) + lines[2][:30])  # interrupted while it was written
    assert trajectories.write(target, None, texts[:5], BLOCK, 4, path, silent) == recorded[:5]
    others = [replace(texts[6], index=0), *texts[1:5]]
    assert trajectories.write(target, None, others, BLOCK, 4, path, silent)[0].prompt == texts[6].prompt
    path.write_text('{"index": 0}\n')
    with pytest.raises(LeapaheadError, match="holds no trajectories of a training run"):
        trajectories.write(target, None, texts[:5], BLOCK, 4, path, silent)


@pytest.mark.slow
def test_the_loss_is_the_papers(target: Any, recorded: list[Trajectory]) -> None:
    """Every state on its own, without tree: the consistency of each wrong position, and the text's cross entropy."""
    own = CllmRecipe(
        Student(model_of(), None, torch.float32, "tiny"),
        cllm.masked_executor(target),
        settings_of(states=1000, ar_weight=3.0),
        recorded,
    )
    some = [recorded[4], replace(recorded[9], answer=recorded[9].answer[:9], states=recorded[9].states[:6])]

    def logp(tokens: list[int]) -> Any:
        with torch.no_grad():
            return own.module(torch.tensor([tokens])).logits[0].double().log_softmax(-1).numpy()

    consistency, text_losses = {}, []
    for number, each in enumerate(some):
        tokens = each.prompt + each.answer
        p = logp(tokens)
        text_losses += [-p[place][tokens[place + 1]] for place in range(len(each.prompt) - 1, len(tokens) - 1)]
        for length, guesses in each.states:
            q = logp([*tokens[:length], *guesses])
            for place in range(length, min(length + len(guesses), len(tokens) - 1)):
                path = (*tokens[:length], *guesses[: place - length + 1])
                if list(path) != tokens[: len(path)]:  # at or behind the first wrong guess
                    consistency[number, path] = (np.exp(p[place]) * (p[place] - q[place])).sum()
    found = own.loss(cllm.Trajectories(some))
    expected = np.mean(list(consistency.values())) + 3 * np.mean(text_losses)
    assert len(consistency) > 20
    assert found.loss.item() == pytest.approx(expected, rel=1e-4)


def test_the_change_is_the_divergence_from_the_original(
    target: Any, recorded: list[Trajectory], tmp_path: Path
) -> None:
    """Of every token of prompt and text, beside the other losses; at the start it is nothing."""
    some = cllm.Trajectories([recorded[4], replace(recorded[9], answer=recorded[9].answer[:9], states=[])])
    (without, _), (own, _) = (
        made(target, recorded, settings_of(keep_weight=weight, states=1000), tmp_path / "checkpoint")
        for weight in (0.0, 3.0)
    )
    assert own.loss(some).loss.item() == pytest.approx(without.loss(some).loss.item(), rel=1e-5)
    for each in (own, without):
        with torch.no_grad():
            each.module.lm_head.weight[5] *= 1.5
    divergences = []
    for each in some.texts:
        with torch.no_grad():
            p, q = (
                model(torch.tensor([each.prompt + each.answer])).logits[0].double().log_softmax(-1)
                for model in (target.model, own.module)
            )
        divergences += (p.exp() * (p - q)).sum(-1).tolist()
    difference = own.loss(some).loss.item() - without.loss(some).loss.item()
    assert difference == pytest.approx(3 * np.mean(divergences), rel=1e-3)
    own.loss(some).loss.backward()
    assert all(each.grad is None for each in target.model.parameters())


@pytest.mark.slow
def test_what_is_kept_changes_less(target: Any, recorded: list[Trajectory], tmp_path: Path) -> None:
    def change(weight: float) -> float:
        settings = settings_of(steps=30, lr=5e-3, keep_weight=weight)
        own, training = made(target, recorded[:6], settings, tmp_path / f"{weight}")
        training.run(QUIET)
        some, original = recorded[:6], cllm.TreeForward(target.model, cllm.masked_executor(target))
        with torch.no_grad():
            logits = own.forward.logits([tree_of(each, 0, random.Random(0)) for each in some])
        return float(own._change(some, logits, original))

    assert change(5.0) < 0.5 * change(0.0)


def test_the_target_of_a_state_has_no_gradient(target: Any, recorded: list[Trajectory], tmp_path: Path) -> None:
    own, _ = made(target, recorded, settings_of(ar_weight=0.0), tmp_path / "checkpoint")
    (tree,) = [tree_of(recorded[3], 100, random.Random(0))]
    seen: list[Any] = []
    logits = own.forward.logits

    def kept(trees: Any) -> Any:
        seen.append(logits(trees))
        seen[-1].retain_grad()
        return seen[-1]

    own.forward.logits = kept
    own.loss(own.batch([recorded[3].text])).loss.backward()
    words = len(recorded[3].prompt) + len(recorded[3].answer)
    assert len(tree) > words
    assert not seen[0].grad[0, :words].any()
    assert seen[0].grad[0, words:].any()


@pytest.mark.slow
def test_tuning_lengthens_jacobi_decoding(target: Any, recorded: list[Trajectory], tmp_path: Path) -> None:
    few = recorded[:6]
    own, training = made(target, few, settings_of(steps=80, lr=5e-3), tmp_path / "checkpoint")
    points = training.run(QUIET).points
    assert points[-1][3] > points[0][3] + 0.2  # right after wrong guesses
    sets = {"all": [each.text for each in few]}
    tuned = loading.load(own.module.eval()).target
    before, after = (cllm_run.measure(each, None, BLOCK, sets, silent, "") for each in (target, tuned))
    assert after[0].acceptance_length > 1.2 * before[0].acceptance_length
    assert after[0].answer_loss < before[0].answer_loss
    llm = LLM(tuned, drafter="jacobi", block=BLOCK)
    for each in recorded[:4]:
        found = llm.generate(each.prompt, max_new_tokens=20)
        assert found.tokens == llm.generate(each.prompt, max_new_tokens=20, drafter="plain").tokens


def test_a_resumed_tuning_is_the_same(target: Any, recorded: list[Trajectory], tmp_path: Path) -> None:
    settings = settings_of(steps=4, accumulate=2, states=3)
    whole, training = made(target, recorded, settings, tmp_path / "whole")
    training.run(QUIET)
    _, first = made(target, recorded, settings, tmp_path / "parts")
    assert first.run(replace(QUIET, interrupts=stopping(2))).step == 2
    resumed, second = made(target, recorded, settings, tmp_path / "parts")
    assert second.run(QUIET).loss == training.state.loss
    for name, each in whole.parameters.items():
        assert torch.equal(each, resumed.parameters[name]), name


def test_held_out_losses(target: Any, texts: list[Text]) -> None:
    def nats(tokens: list[int], places: range) -> list[float]:
        with torch.no_grad():
            logp = target.model(torch.tensor([tokens])).logits[0].double().log_softmax(-1)
        return [-logp[place - 1][tokens[place]].item() for place in places]

    prompts = [loss for text in texts for loss in nats(text.prompt, range(1, len(text.prompt)))]
    answers = [loss for text in texts for loss in nats(text.tokens, range(len(text.prompt), len(text.tokens)))]
    assert cllm_run.losses_of(target, texts) == pytest.approx((np.mean(prompts), np.mean(answers)), rel=1e-5)


# ------------------------------------------------------------------------------------------- settings, the command


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"block": 0}, "block=0 is not possible: it must be at least 1"),
        ({"ar_weight": -1.0}, r"ar_weight=-1\.0 is not possible"),
        ({"keep_weight": -1.0}, r"keep_weight=-1\.0 is not possible"),
        ({"keep_weight": float("nan")}, "keep_weight=nan is not possible: it must be a finite number of at least 0"),
        ({"sampled": 0.5}, r"sampled=0\.5 is not possible"),
        ({"data": ""}, "give data=FILE of prompts, texts=FILE"),
    ],
)
def test_impossible_settings(given: dict[str, Any], message: str) -> None:
    with pytest.raises(LeapaheadError, match=message):
        CllmSettings(**{"data": "a", **given})


def test_what_cannot_be_tuned_is_refused() -> None:
    from leapahead.models.toy import ToyTarget

    with pytest.raises(LeapaheadError, match="cannot be tuned for Jacobi decoding, which needs a decoder-only model"):
        cllm.masked_executor(ToyTarget(8))
    with pytest.raises(LeapaheadError, match="cannot be tuned for Jacobi decoding, which needs a decoder-only model"):
        cllm.masked_executor(loading.load(seq2seq.build("t5")).target)
    with pytest.raises(LeapaheadError, match="none of the texts is greedy"):
        cllm_run._greedy([Text(0, [1], [2], 1.0)])


def test_texts_are_divided_after_the_sampled_ones_are_left_out(target: Any, tmp_path: Path) -> None:
    llm, file = LLM(target), tmp_path / "texts.jsonl"
    head = {**text_files._model(llm), "data": "prompts.jsonl"}
    some = [asdict(Text(place, [1, place], [3, 4], float(place < 5))) for place in range(8)]
    file.write_text("".join(json.dumps(line) + "\n" for line in (head, *some)))
    for seed in range(8):
        settings = CllmSettings(texts=str(file), held_out=0.3, seed=seed)
        trained, held_out, _ = gathered(llm, settings, Folder(tmp_path), QUIET, cllm_run._greedy)
        assert sorted(text.index for text in (*trained, *held_out)) == [5, 6, 7]
        assert len(held_out) == 1


@pytest.mark.slow
def test_the_command_tunes_a_model_and_reports_say_so(leapahead: Any, tmp_path: Path) -> None:
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    few = ("--max-new-tokens", "8", "--steps", "2", "--batch", "2", "--held-out", "0.3")
    given = ("train-cllm", "--data", str(data), "--out", str(tmp_path / "run"), *few)
    result = leapahead(*given)
    assert result.exit_code == 0, result.stderr
    assert "lossless with respect to the tuned model" in result.stdout
    folder = tmp_path / "run" / "tuned"
    readme = (folder / "README.md").read_text()
    assert "lossless with respect to the tuned model" in readme
    assert readme.count("| tuned |") == 1
    record = json.loads((folder / "measured.json").read_text())
    assert (record["steps"], record["settings"]["block"], record["settings"]["keep_weight"]) == (2, 8, 0.0)
    assert [len(record[name]) for name in ("before", "after")] == [1, 1]
    assert f"| {record['after'][0]['acceptance_length']:.2f} |" in readme
    found = json.loads(leapahead(*given, "--resume", "--json").stdout)
    assert (found["tuned"], len(found["before"]), len(found["after"])) == (str(folder), 1, 1)

    note = f"Lossless with respect to the tuned model: {folder} was tuned from bundled, whose texts are others."
    text = leapahead("generate", "def add", "--max-new-tokens", "8", "-d", "jacobi", "-m", str(folder))
    assert note in text.stderr
    plain = leapahead("generate", "def add", "--max-new-tokens", "8", "-d", "plain", "-m", str(folder), "--json")
    assert json.loads(plain.stdout)["reference"] == note
    out = tmp_path / "bench"
    data.rename(tmp_path / "humaneval.jsonl")
    bench = ("bench", "-m", str(folder), "-d", "jacobi", "--data", str(tmp_path), "--rounds", "1", "--out", str(out))
    measured = leapahead(*bench, "--max-new-tokens", "4", "-t", "0")
    assert measured.exit_code == 0, measured.stderr
    assert note in measured.stdout
    assert note in (out / "report.md").read_text()
    assert "reference" not in json.loads(leapahead("generate", "a", "--max-new-tokens", "2", "--json").stdout)


def test_figures_of_drafters_whose_statistics_are_numbers(target: Any, texts: list[Text]) -> None:
    from research.acceptance import acceptance

    llm = LLM(target, drafter_cache=False)
    prompts: Any = {"all": [text.prompt for text in texts[:2]]}
    configurations: Any = [("plain", "plain", {}), ("Jacobi", "jacobi", {"block": BLOCK})]
    rows = acceptance(llm, prompts, (0.0,), 8, configurations=configurations)
    assert [row["different"] for row in rows] == [0, 0]
