"""Distillation of draft models: the loss is that of DistillSpec, and the result drafts with the target's text."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import save_file  # noqa: E402
from training_parts import QUIET, VOCABULARY, model_of, small_model, stopping, texts_of  # noqa: E402
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel  # noqa: E402

from leapahead import LLM  # noqa: E402
from leapahead.bench.conditions import silent  # noqa: E402
from leapahead.core.errors import LeapaheadError, Refused  # noqa: E402
from leapahead.models import loading  # noqa: E402
from leapahead.training import decoding, draft_model  # noqa: E402
from leapahead.training.batches import Order  # noqa: E402
from leapahead.training.draft_model import DraftRecipe  # noqa: E402
from leapahead.training.loop import Training, Watch, autocast  # noqa: E402
from leapahead.training.settings import DIVERGENCES, DraftSettings  # noqa: E402
from leapahead.training.student import Student  # noqa: E402
from leapahead.training.texts import Text  # noqa: E402

PROMPTS = ["def add(a, b):", "The quick brown", "for number in", "print(number,", "jumps over", "return a + b"]


@pytest.fixture(scope="module")
def target() -> Any:
    return loading.load(model_of()).target


@pytest.fixture(scope="module")
def texts() -> list[Text]:
    return texts_of(model_of())


def student_of(vocabulary: int = VOCABULARY) -> Student:
    """A draft model of one layer with random weights."""
    return Student(small_model(vocabulary), None, torch.float32, "small")


def settings_of(**more: Any) -> DraftSettings:
    given = {"data": "prompts.jsonl", "steps": 60, "batch": 8, "lr": 1e-2, **more}
    return DraftSettings(**given).complete(16)


def made(target: Any, texts: list[Text], settings: DraftSettings, path: Path, ends: Any = ()) -> Any:
    own = DraftRecipe(student_of(), target, settings, ends)
    order = Order(texts, settings.batch, settings.seed)
    return own, Training(own, order, own.batch, settings, path, own.batch(texts[:4]))


def logits_of(model: Any, tokens: list[int]) -> Any:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].double()


# ---------------------------------------------------------------------------------------------------- the training


def test_the_loss_is_the_mean_over_texts_of_the_mean_over_their_answers(target: Any, texts: list[Text]) -> None:
    own = DraftRecipe(student_of(), target, settings_of(divergence="tvd"), ())
    some = [texts[4], replace(texts[9], answer=texts[9].answer[:3])]
    expected, right = [], []
    for text in some:
        q, p = (logits_of(model, text.tokens).softmax(-1).numpy() for model in (own.module, target.model))
        rows = range(len(text.prompt) - 1, len(text.tokens) - 1)
        expected.append(np.mean([0.5 * np.abs(p[row] - q[row]).sum() for row in rows]))
        right.append(np.mean([q[row].argmax() == text.tokens[row + 1] for row in rows]))
    found = own.loss(own.batch(some))
    assert found.loss.item() == pytest.approx(np.mean(expected), abs=1e-5)
    assert found.agreement.tolist() == pytest.approx([np.mean(right), 1 - np.mean(expected)], abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_every_divergence_brings_the_draft_model_nearer(
    divergence: str, target: Any, texts: list[Text], tmp_path: Path
) -> None:
    before = [each.clone() for each in target.model.parameters()]
    _, training = made(target, texts, settings_of(divergence=divergence), tmp_path / "checkpoint")
    points = training.run(QUIET).points
    assert points[-1][1] < 0.9 * points[0][1]
    assert points[-1][3] > points[0][3] + 0.03  # 1 - total variation distance
    assert all(torch.equal(one, other) for one, other in zip(before, target.model.parameters(), strict=True))


def test_a_checkpoint_tells_what_agrees_by_its_name(target: Any, texts: list[Text], tmp_path: Path) -> None:
    lines: list[str] = []
    _, training = made(target, texts, settings_of(steps=1), tmp_path / "checkpoint")
    training.held_out = training.batches(texts[:2])
    training.run(Watch(silent, lines.append))
    (line,) = lines
    assert re.search(r"loss [\d.]+, likeliest token is the text's [\d.]+, 1 - total variation distance [\d.]+$", line)


def test_a_smaller_vocabulary_is_compared_as_far_as_it_goes(target: Any, texts: list[Text]) -> None:
    own = DraftRecipe(student_of(VOCABULARY + 8), target, settings_of(), ())
    assert own.loss(own.batch(texts[:2])).loss.isfinite()


def test_tokens_that_one_of_the_models_does_not_have_are_no_error(target: Any, texts: list[Text]) -> None:
    """Models of one tokenizer may have rows for no token, in different numbers, which are sampled now and then."""
    known, unknown = Text(0, [1, 2], [3] * 4), Text(1, [1, 2], [3, VOCABULARY - 1])
    with pytest.warns(
        UserWarning, match=rf"1 of 2 texts left out of the training: .* or its vocabulary of {VOCABULARY - 8}"
    ):
        assert draft_model.fitting(student_of(VOCABULARY - 8), [known, unknown]) == [known]
    own = DraftRecipe(student_of(VOCABULARY + 8), target, settings_of(on_policy=1.0), ())
    own.module.lm_head.weight.data[:VOCABULARY] = 0.0
    own.module.lm_head.weight.data[VOCABULARY:] *= 1000
    found = own.own_answers(own.batch(texts[:4]), 0)
    assert max(token for text in found.texts for token in text.answer) < VOCABULARY
    assert own.loss(found).loss.isfinite()


def test_answers_of_the_draft_model_are_its_own(target: Any, texts: list[Text]) -> None:
    own = DraftRecipe(student_of(), target, settings_of(on_policy=1.0), ())
    own.module.lm_head.weight.data *= 1000  # its likeliest token has all probability
    config = own.module.generation_config  # of the model, which is another one then
    config.no_repeat_ngram_size, config.min_new_tokens = 1, 1
    found = own.own_answers(own.batch(texts[3:7]), 5)
    for text, other in zip(found.texts, texts[3:7], strict=True):
        assert text.prompt == other.prompt
        assert len(text.answer) == 20
        rows = range(len(text.prompt) - 1, len(text.tokens) - 1)
        assert text.answer == logits_of(own.module, text.tokens).argmax(-1)[list(rows)].tolist()
    assert own.module.generation_config is config


def test_weights_have_gradients_after_answers_of_the_draft_model(target: Any, texts: list[Text]) -> None:
    """Autocast keeps a cast weight to the end of its block, in older torch also one that was cast without them."""
    own = DraftRecipe(student_of(), target, settings_of(on_policy=1.0), ())
    with torch.autocast("cpu", torch.bfloat16):
        found = own.loss(own.batch(texts[:2]), torch.Generator().manual_seed(0))
    found.loss.backward()
    weights = {name: each for name, each in own.parameters.items() if "q_proj.weight" in name}
    assert weights
    for name, each in weights.items():
        assert each.grad is not None, name
        assert each.grad.count_nonzero(), name


def test_answers_of_the_draft_model_follow_the_seed_and_end(target: Any, texts: list[Text]) -> None:
    own = DraftRecipe(student_of(), target, settings_of(), ())
    one, again, other = (own.own_answers(own.batch(texts[:4]), seed).texts for seed in (1, 1, 2))
    assert [text.answer for text in one] == [text.answer for text in again]
    assert [text.answer for text in one] != [text.answer for text in other]
    own.ends = (one[0].answer[4],)
    for text in own.own_answers(own.batch(texts[:4]), 1).texts:
        assert set(own.ends) & set(text.answer[:-1]) == set()
        assert len(text.answer) == 20 or text.answer[-1] in own.ends


@pytest.mark.slow
def test_a_resumed_training_is_the_same(target: Any, texts: list[Text], tmp_path: Path) -> None:
    settings = settings_of(steps=6, on_policy=0.5, accumulate=2)
    whole, training = made(target, texts, settings, tmp_path / "whole")
    training.run(QUIET)
    _, first = made(target, texts, settings, tmp_path / "parts")
    assert first.run(replace(QUIET, interrupts=stopping(3))).step == 3
    resumed, second = made(target, texts, settings, tmp_path / "parts")
    assert second.run(QUIET).loss == training.state.loss
    for name, each in whole.parameters.items():
        assert torch.equal(each, resumed.parameters[name]), name


def gpt2(context: int = 64) -> Student:
    """A draft model with dropout, and with an embedding for every position."""
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2, n_positions=context, bos_token_id=None, eos_token_id=None
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return Student(GPT2LMHeadModel(config).eval(), None, torch.float32, "gpt2")


def test_dropout_follows_the_seed_and_spares_held_out_texts(target: Any, texts: list[Text], tmp_path: Path) -> None:
    settings, trained = settings_of(steps=4, batch=2), list[DraftRecipe]()
    for name, parts in (("whole", [9]), ("parts", [2, 9])):
        for steps in parts:
            torch.manual_seed(len(trained) + steps)
            own = DraftRecipe(gpt2(), target, settings, ())
            training = Training(own, Order(texts, 2, 0), own.batch, settings, tmp_path / name, own.batch(texts[:2]))
            training.run(replace(QUIET, interrupts=stopping(steps)))
        trained.append(own)
    for name, each in trained[0].parameters.items():
        assert torch.equal(each, trained[1].parameters[name]), name
    own.module.eval()
    with autocast(own.device):  # of bfloat16, where this processor has it
        assert training.state.held_out[-1][1] == own.loss(own.batch(texts[:2])).loss.item()


def test_texts_that_exceed_the_context_of_the_draft_model_are_left_out(target: Any) -> None:
    short, long = Text(0, [1, 2], [3] * 4), Text(1, [1] * 5, [3] * 4)
    with pytest.warns(UserWarning, match="1 of 2 texts left out of the training: .* the draft model gpt2, 8 tokens"):
        assert draft_model.fitting(gpt2(8), [short, long]) == [short]
    with pytest.raises(LeapaheadError, match="none of the texts fits the context of the draft model gpt2"):
        draft_model.fitting(gpt2(8), [long])
    own = DraftRecipe(gpt2(8), target, settings_of(), ())
    sampled = own.own_answers(own.batch([short, Text(2, [1] * 6, [3] * 2)]), 0)
    assert [len(text.answer) for text in sampled.texts] == [2, 2]
    own.loss(sampled)


@pytest.mark.slow
def test_distillation_raises_the_acceptance_and_keeps_the_text(target: Any, texts: list[Text], tmp_path: Path) -> None:
    own, training = made(target, texts, settings_of(steps=80), tmp_path / "checkpoint")
    Student(own.module, None, torch.float32, "before").save(tmp_path / "before")
    training.run(QUIET)
    Student(own.module, None, torch.float32, "after").save(tmp_path / "after")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "after")
    torch.testing.assert_close(logits_of(saved, texts[5].tokens), logits_of(own.module, texts[5].tokens))
    before, after = (
        decoding.evaluations(
            target, None, {"all": texts}, silent, name, drafter="draft_model", draft=str(tmp_path / name)
        )[0]
        for name in ("before", "after")
    )
    assert after.chain > 1.1 * before.chain
    assert after.depths[0] > before.depths[0]
    with LLM(model_of(), drafter="draft_model", draft=str(tmp_path / "after"), nodes=4) as llm:
        for text in texts[:4]:
            assert llm.generate(text.prompt, max_new_tokens=20).tokens == text.answer


# ------------------------------------------------------------------------------------------- settings, the command


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"divergence": "l2"}, "divergence='l2' is not possible; choose one of forward-kl, reverse-kl, jsd, tvd"),
        ({"on_policy": 1.5}, "on_policy=1.5 is not possible: it must be from 0 to 1"),
        ({"data": ""}, "give data=FILE of prompts, texts=FILE"),
        ({"retention": 0.1}, "retention=0.1 is not possible with draft, which does not read it"),
        ({"least_retention": 0.1}, "least_retention=0.1 is not possible with draft"),
    ],
)
def test_impossible_settings(given: dict[str, Any], message: str) -> None:
    with pytest.raises(LeapaheadError, match=message):
        DraftSettings(**{"data": "a", **given})


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    return file


@pytest.mark.slow
def test_the_command_distils_a_draft_model(leapahead: Any, data: Path, tmp_path: Path) -> None:
    few = ("--max-new-tokens", "8", "--steps", "2", "--batch", "2", "--held-out", "0.3", "--on-policy", "0.5")
    given = ("train-draft", "--draft", "bundled", "--data", str(data), "--out", str(tmp_path / "run"), *few)
    result = leapahead(*given)
    assert result.exit_code == 0, result.stderr
    assert "2 steps" in result.stdout
    folder = tmp_path / "run" / "draft"
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md", "curves.png"} <= {
        each.name for each in folder.iterdir()
    }
    assert len({each.stat().st_mode for each in folder.iterdir()}) == 1  # whoever reads one file reads all
    readme = (folder / "README.md").read_text()
    assert "Divergence: forward-kl" in readme
    assert "held out" in readme
    assert readme.count("| distilled |") == readme.count("| as before |") > 0
    text = leapahead("generate", "def add", "--max-new-tokens", "8", "-d", "draft_model", "--draft", str(folder))
    assert text.stdout == leapahead("generate", "def add", "--max-new-tokens", "8", "-d", "plain").stdout
    found = json.loads(leapahead(*given, "--resume", "--json").stdout)
    assert (found["steps"], found["draft"]) == (2, str(folder))
    assert len(found["before"]) == len(found["evaluations"]) == readme.count("| distilled |")


def test_a_draft_model_with_its_own_code_drafts_where_it_was_trained(
    target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The evaluation refused the code of the draft model after the training, whatever was allowed."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "own"
    small_model().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    code = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "own", "auto_map": code}))
    (folder / "own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
        "class OwnModel(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    sets, how = {"all": [Text(0, [1, 2, 3], [4, 5, 6])]}, {"drafter": "draft_model", "draft": str(folder)}
    with pytest.raises(LeapaheadError, match="comes with Python code"):
        decoding.evaluations(target, None, sets, silent, "", **how)
    (found,) = decoding.evaluations(target, None, sets, silent, "", **how, trust_remote_code=True)
    assert found.tokens


def test_models_whose_weights_cannot_be_trained_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peft = pytest.importorskip("peft")
    small_model().save_pretrained(tmp_path)
    peft.LoraConfig(target_modules=["q_proj"], r=2).save_pretrained(tmp_path)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    adapter = {f"{name}A.weight": torch.ones(2, 16), f"{name}B.weight": torch.ones(16, 2)}
    save_file(adapter, tmp_path / "adapter_model.safetensors", metadata={"format": "pt"})
    with pytest.raises(Refused, match=r"small cannot be trained, since its folder has an adapter .*merge_and_unload"):
        Student.load(str(tmp_path), "small", torch.device("cpu"))
    model = small_model()
    model.is_quantized = True
    monkeypatch.setattr("leapahead.training.student.load_files", lambda *_: (model, None, tmp_path))
    with pytest.raises(Refused, match="small cannot be trained, since its weights are quantised; give one"):
        Student.load(str(tmp_path), "small", torch.device("cpu"))


def test_what_cannot_be_distilled_is_refused(target: Any, tiny_folder: Path) -> None:
    for name, message in (("self:int8", "is made of the target"), ("small.gguf", "give the folder of Transformers")):
        with pytest.raises(LeapaheadError, match=message):
            draft_model.load(name, target, None)
    tokenizer = loading.load(None).tokenizer
    with pytest.raises(LeapaheadError, match="has another vocabulary than the target"):
        draft_model.load(str(tiny_folder), target, tokenizer)
