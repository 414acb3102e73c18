"""The files of a training run, and `leapahead train-head`: texts, hidden states, heads that are read, clear errors."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import signal
import sys
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import heads  # noqa: E402
from safetensors import SafetensorError  # noqa: E402
from training_parts import QUIET, made, model_of, settings_of, texts_of  # noqa: E402

from leapahead import LLM  # noqa: E402
from leapahead.bench import tasks  # noqa: E402
from leapahead.bench.conditions import silent  # noqa: E402
from leapahead.cli import screen  # noqa: E402
from leapahead.core.errors import LeapaheadError, Refused  # noqa: E402
from leapahead.drafters.heads import checkpoint, load, modules  # noqa: E402
from leapahead.drafters.heads.dflash import DFlash  # noqa: E402
from leapahead.drafters.heads.hydra import Hydra  # noqa: E402
from leapahead.models import loading  # noqa: E402
from leapahead.models.toy import ToyTarget  # noqa: E402
from leapahead.training import card, export, texts  # noqa: E402
from leapahead.training.features import Online, Stored, training_target  # noqa: E402
from leapahead.training.loop import State  # noqa: E402
from leapahead.training.recipes import draft_vocabulary  # noqa: E402
from leapahead.training.run import gathered, run_of, train_head  # noqa: E402
from leapahead.training.settings import MUON_RATES, TRAINED, DraftSettings, Folder, Settings  # noqa: E402
from leapahead.training.texts import Wish  # noqa: E402

PROMPTS = ["def add(a, b):", "The quick brown", "for number in", "print(number,", "jumps over", "return a + b"]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    return file


# ------------------------------------------------------------------------------------------------------- prompts


def test_prompts_of_every_form(tmp_path: Path) -> None:
    message, answer = {"role": "user", "content": "d"}, {"role": "assistant", "content": "e"}
    chats = [[message], [message, answer], [message, answer, message]]
    records = [{"prompt": "a"}, {"question": "b"}, {"turns": ["c", "later"]}, *({"messages": chat} for chat in chats)]
    (tmp_path / "some.jsonl").write_text("\n".join(map(json.dumps, records)))
    found = tasks.read_file(tmp_path / "some.jsonl")
    assert found.prompts == ["a", "b", [{"role": "user", "content": "c"}], chats[0], chats[0], chats[2]]
    (tmp_path / "lines.txt").write_bytes(b"one\n\n two\r\n")
    assert tasks.read_file(tmp_path / "lines.txt").prompts == ["one", " two"]
    assert tasks.read_file(tmp_path / "lines.txt", 1).prompts == ["one"]
    content = '{"prompt": "a\u2028b", "prediction": "c"}\n{"question": "d"}'
    (tmp_path / "edits.JSON").write_text(content, "utf-8-sig")  # with a byte order mark, as Windows' editors write it
    edits = tasks.read_file(tmp_path / "edits.JSON")
    assert (edits.prompts, edits.predictions) == (["a\u2028b", "d"], {"a\u2028b": "c"})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no prompts"),
        ("{", "line 1 is not JSON"),
        ("[" * 200_000, "line 1 is not JSON"),
        ("9" * 5000, "line 1 is not JSON"),
        ('{"text": "a"}', "has none of the fields prompt, question, turns, messages"),
        ('{"prompt": 1}', "the field 'prompt' holds no text"),
        ('{"messages": []}', "the field 'messages' holds no messages"),
        ('{"messages": [{"role": "user"}]}', "a message must have the texts 'role' and 'content'"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "must have a message that the model is to answer"),
        ('["a"]', "line 1 is not a JSON object"),
        ('{"turns": []}', "the field 'turns' holds no text"),
        ('{"prompt": "a", "prediction": 1}', "'prediction' must be text"),
        ('{"turns": ["a"], "prediction": "b"}', "beside a prompt that is text"),
        (
            '{"prompt": "a", "prediction": "b"}\n{"question": "a", "prediction": "c"}',
            "line 2: an earlier line has the same prompt with another 'prediction'",
        ),
    ],
)
def test_prompts_that_are_none(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "some.jsonl").write_text(content)
    with pytest.raises(LeapaheadError, match=message):
        tasks.read_file(tmp_path / "some.jsonl")


def test_prompts_that_leave_no_room_are_left_out_with_a_word(tmp_path: Path) -> None:
    (tmp_path / "some.txt").write_text("short\n" + "long " * 40 + "\nshort, too\n")
    with LLM() as llm:
        most = llm.target.info.context_length - 20
        with pytest.warns(UserWarning, match=rf"1 of 3 prompts of .*some\.txt left out: they.*max_new_tokens={most}"):
            assert len(texts.prompts(llm, Wish(tmp_path / "some.txt", most))) == 2


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")
def test_prompts_from_a_pipe(tmp_path: Path) -> None:
    """As the shell gives them for `--prompts <(head -5 many.txt)`."""
    os.mkfifo(tmp_path / "63")
    writer = Thread(target=(tmp_path / "63").write_text, args=("one\ntwo\n",))
    writer.start()
    (found,) = tasks.read(tmp_path / "63")
    writer.join()
    assert (found.name, found.prompts) == ("63", ["one", "two"])


@pytest.mark.parametrize(("content", "message"), [(None, "No such file"), (b"\xff\xfe", "it is not UTF-8 text")])
def test_prompts_that_cannot_be_read(content: bytes | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(LeapaheadError, match=f"cannot be read: {message}"):
        tasks.read_file(tmp_path / "a.txt")


# --------------------------------------------------------------------------------------------------------- texts


@pytest.mark.slow
def test_texts_are_the_targets_and_go_on(tiny_folder: Path, data: Path, tmp_path: Path) -> None:
    llm = LLM(str(tiny_folder), max_batch=2)
    wish, file = Wish(data, 12, sampled=0.5, seed=7), tmp_path / "texts.jsonl"
    found = texts.write(llm, wish, file, silent)
    assert [text.index for text in found] == list(range(len(PROMPTS)))
    assert sum(text.temperature for text in found) == 3
    for text in found:
        options = {"temperature": text.temperature, "seed": 7 + text.index}
        expected = llm.generate(PROMPTS[text.index], max_new_tokens=12, drafter="plain", **options)
        assert (text.prompt, text.answer) == (expected.prompt_tokens, expected.tokens)
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:3]) + lines[3][:20])  # interrupted while it was written
    assert texts.write(llm, wish, file, silent) == found
    assert sorted(file.read_text().splitlines()) == sorted("".join(lines).splitlines())
    assert texts.read(llm, file) == found
    assert texts.written_for(file) == "prompts.jsonl"


def test_what_an_interrupt_left_of_a_line_is_removed_by_its_own_run_only(tmp_path: Path) -> None:
    """Another run may still be writing it."""
    file = tmp_path / "texts.jsonl"
    whole = '{"weights": "0", "data": "prompts.jsonl"}\n{"index": 0, "prompt": [1], "answer": [2], "temperature": 0}\n'
    file.write_text(whole + '{"index": 1, "pro')
    texts.check_file(file)
    assert file.read_text() != whole
    texts.cut(file)
    assert file.read_text() == whole


def test_a_file_of_texts_is_read_line_by_line(tmp_path: Path) -> None:
    """So no memory is taken beside that of the texts."""
    file = tmp_path / "texts.jsonl"
    records = ({"index": each, "prompt": [each], "answer": list(range(300, 400))} for each in range(500))
    file.write_text("\n".join(map(json.dumps, ({"weights": "0", "data": "prompts.jsonl"}, *records))) + "\n")
    tracemalloc.start()
    try:
        found = texts._read(file, {})
        left, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(found) == 500
    assert peak < 1.1 * left


def test_a_full_disk_is_told_by_the_name_of_the_file(
    tiny_folder: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(path: Path, mode: str = "r", **options: Any) -> Any:
        if "a" in mode:
            raise OSError(errno.ENOSPC, "No space left on device")
        return open(path, mode, **options)

    monkeypatch.setattr(Path, "open", opened)
    message = r"texts\.jsonl cannot be written: No space left on device; .* --resume goes on with what it holds"
    with pytest.raises(LeapaheadError, match=message):
        texts.write(LLM(str(tiny_folder)), Wish(data, 4), tmp_path / "texts.jsonl", silent)


def test_texts_go_on_after_an_interrupt_in_any_line(tiny_folder: Path, data: Path, tmp_path: Path) -> None:
    """A full disk leaves less than the first line. A file that is read only, of another run, is not changed."""
    llm, file = LLM(str(tiny_folder)), tmp_path / "texts.jsonl"
    found = texts.write(llm, Wish(data, 2), file, silent)
    whole = file.read_bytes()
    for length in (0, 10, len(whole) - 10):
        file.write_bytes(whole[:length])
        assert texts.write(llm, Wish(data, 2), file, silent) == found
    file.write_bytes(whole[:-10])
    assert texts.read(llm, file) == found[:-1]
    assert file.read_bytes() == whole[:-10]


def test_texts_of_another_run_and_further_prompts_are_trained_on_together(
    tiny_folder: Path, data: Path, tmp_path: Path
) -> None:
    llm, other = LLM(str(tiny_folder)), tmp_path / "others.jsonl"
    other.write_text('{"prompt": "def more"}\n{"prompt": "class More"}\n')
    before = texts.write(llm, Wish(data, 6), tmp_path / "texts.jsonl", silent)
    settings = DraftSettings(data=str(other), texts=str(tmp_path / "texts.jsonl"), max_new_tokens=6, held_out=0.0)
    folder = Folder(tmp_path / "run", "draft")
    folder.begin(settings)
    found, _, _ = gathered(llm, settings, folder, QUIET)
    again, _, _ = gathered(llm, settings, folder, QUIET)
    assert found == again
    assert found[: len(before)] == before
    assert [text.index for text in found] == list(range(len(before) + 2))
    assert llm.tokenizer is not None
    assert [llm.tokenizer.decode(text.prompt) for text in found[len(before) :]] == ["def more", "class More"]
    state = State(step=1, seconds=1.0, points=[[1, 1.0]])
    run = run_of(settings.complete(64), found, folder, state, (), {"gpu": None, "cpu": "a core"}, "")
    told = card.training(run, "")
    assert "to the prompts of `prompts.jsonl` and `others.jsonl`;" in told
    assert "1 steps of 8 texts (1.0 epochs)" in told  # fewer than a batch


def test_prompts_to_evaluate_with_that_do_not_fit_are_refused_before_a_text_is_decoded(
    tiny_folder: Path, data: Path, tmp_path: Path
) -> None:
    long = tmp_path / "long.txt"
    long.write_text("long " * 2000)
    settings = DraftSettings(data=str(data), evaluate=(str(long),), max_new_tokens=6)
    folder = Folder(tmp_path / "run", "draft")
    folder.begin(settings)
    with pytest.raises(LeapaheadError, match=r"long\.txt holds no prompt that leaves room for max_new_tokens=6"):
        gathered(LLM(str(tiny_folder)), settings, folder, QUIET)
    folder.check(settings, resume=False)  # it is as good as new


def test_texts_of_others_are_refused(tiny_folder: Path, data: Path, tmp_path: Path) -> None:
    llm, file = LLM(str(tiny_folder)), tmp_path / "texts.jsonl"
    texts.write(llm, Wish(data, 4), file, silent)
    with pytest.raises(LeapaheadError, match="was written with max_new_tokens 4, not 5"):
        texts.write(llm, Wish(data, 5), file, silent)
    with pytest.raises(LeapaheadError, match=r"was written with weights .*; give texts that this model has written$"):
        texts.read(LLM(model_of()), file)
    with pytest.raises(LeapaheadError, match=r"holds no texts of a training run; give one's texts\.jsonl"):
        texts.read(llm, data)


def test_held_out_texts_are_not_trained_on() -> None:
    some = texts_of(model_of(), 10)
    trained, held_out = texts.divide(some, 0.3, seed=1)
    assert len(held_out) == 3
    assert sorted(text.index for text in (*trained, *held_out)) == list(range(10))
    with pytest.raises(LeapaheadError, match=r"^1 text with at least 2 tokens, too few"):
        texts.divide(some[:1], 0.3, seed=1)
    twice = [*some, *(replace(text, index=text.index + 10) for text in some)]  # of two files with the same prompts
    trained, held_out = texts.divide(twice, 0.3, seed=1)
    assert len(held_out) == 6
    assert not {tuple(text.prompt) for text in held_out} & {tuple(text.prompt) for text in trained}
    with pytest.raises(LeapaheadError, match="all texts are answers to held-out prompts; give more prompts"):
        texts.divide([some[0], some[0]], 0.3, seed=1)


def test_texts_of_prompts_that_are_only_evaluated_are_not_trained_on() -> None:
    some = texts_of(model_of(), 4)
    with pytest.warns(UserWarning, match="1 of 4 texts left out of the training: their prompts are among those"):
        assert texts.without(some, [replace(some[2], index=0, answer=[1, 2])]) == [*some[:2], some[3]]
    with warnings.catch_warnings(action="error"):
        assert texts.without(some, []) == some


# ------------------------------------------------------------------------------------------------- hidden states


def test_only_models_of_transformers_are_trained_for() -> None:
    with pytest.raises(
        Refused, match="which is no model of Transformers, as a head needs; give the folder that it was"
    ):
        training_target(ToyTarget(8))


def test_curves_of_a_few_steps_without_held_out_texts_have_no_empty_legend(recwarn: pytest.WarningsRecorder) -> None:
    measured = {"versions": {"leapahead": "1"}}
    card.curves({"conditions": measured, "kind": "medusa", "points": [], "held_out": [], "agreement": []})
    assert not [each for each in recwarn if "legend" in str(each.message)]


def test_hidden_states_on_disk_are_those_computed(tmp_path: Path) -> None:
    model = model_of()
    target, some = training_target(loading.load(model).target), texts_of(model, 5)
    online, stored = Online(target, (0, 1, 2)), Stored(target, (0, 1, 2), tmp_path, some, silent)
    (file,) = tmp_path.iterdir()
    with torch.no_grad():
        states = model(torch.tensor([some[3].tokens]), output_hidden_states=True).hidden_states
    torch.testing.assert_close(online.of(some)[3], torch.cat(states, dim=-1)[0])
    for own, other in zip(online.of(some[2:4]), stored.of(some[2:4]), strict=True):
        assert other.dtype == torch.float16
        torch.testing.assert_close(other.float(), own, atol=1e-2, rtol=1e-3)
    written = file.stat().st_mtime_ns
    Stored(target, (0, 1, 2), tmp_path, some, silent)
    assert file.stat().st_mtime_ns == written
    others = [replace(some[4 - each.index], index=each.index) for each in some]  # of a later run
    stored = Stored(target, (0, 1, 2), tmp_path, others, silent)
    torch.testing.assert_close(stored.of(others[:1])[0].float(), online.of(others[:1])[0], atol=1e-2, rtol=1e-3)


def test_a_full_disk_leaves_no_half_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    target, some = training_target(loading.load(model).target), texts_of(model, 5)
    _, training = made(target, some, settings_of("medusa", steps=1), tmp_path / "checkpoint")

    def full(tensors: Any, file: Path, *_: Any) -> None:
        file.touch()
        raise SafetensorError("No space left on device")

    for module in ("loop", "features"):
        monkeypatch.setattr(f"leapahead.training.{module}.save_file", full)
    with pytest.raises(LeapaheadError, match="checkpoint cannot be written: No space left on device"):
        training.run(QUIET)
    with pytest.raises(LeapaheadError, match="cannot be written: No space left on device; give --features online"):
        Stored(target, (0, 1, 2), tmp_path, some, silent)
    assert list(tmp_path.iterdir()) == []


def test_a_target_whose_logits_are_scaled_is_refused() -> None:
    model = model_of()
    target = loading.load(model).target
    forward = model.lm_head.forward
    model.lm_head.forward = lambda states: 0.5 * forward(states)
    with pytest.raises(Refused, match="its logits are not its last hidden state times its output layer"):
        training_target(target)


# --------------------------------------------------------------------------------------------------------- files


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "draft_vocab"),
    [
        *(("medusa", 20), ("eagle3", 20), ("hydra++", 0), ("dflash", 0)),
        *(("dflash2", 0), ("peagle", 20), ("medusa", 0), ("eagle", 0), ("eagle3", 0), ("hydra", 0), ("hydra", 20)),
    ],
)
def test_a_written_head_is_read_with_equal_logits(kind: str, draft_vocab: int, tmp_path: Path) -> None:
    model = model_of()
    loaded, some = loading.load(model).target, texts_of(model)
    settings = settings_of(kind, steps=3, draft_vocab=draft_vocab)
    own, training = made(training_target(loaded), some, settings, tmp_path / "checkpoint")
    training.run(QUIET)
    export.export(own, tmp_path / "head")
    assert len({file.stat().st_mode for file in (tmp_path / "head").iterdir()}) == 1  # whoever reads one reads all
    config, tensors = checkpoint.read(tmp_path / "head")
    assert ("d2t" in tensors) == (
        kind in ("eagle3", "peagle") and draft_vocab > 0
    )  # vLLM refuses it beside a complete vocabulary
    found = load.load(config, tensors, loaded, "head")
    assert found.config.kind == kind
    assert (found.config.vocab_size, found.config.draft_vocab_size) == (64, draft_vocab or 64)
    assert found.layers == ((0, 1, 2) if kind in ("eagle3", "peagle", "dflash", "dflash2") else (-1,))
    if draft_vocab:
        ids = draft_vocabulary(some, draft_vocab, own.target)
        assert ids is not None
        np.testing.assert_array_equal(found.target_ids(np.arange(draft_vocab)), ids.numpy())
        counts = np.bincount([token for text in some for token in text.answer], minlength=64)
        assert counts[ids].min() >= np.delete(counts, ids).max()
    states, tokens = torch.randn(1, 4, 96), torch.tensor([[3, 1, 4, 1]])
    with torch.no_grad():
        logits = [_logits(module, states, tokens) for module in (own.module, found.module)]
    torch.testing.assert_close(*logits, atol=1e-5, rtol=1e-6)  # one of them may lie in memory otherwise
    with LLM(model, drafter="head", head=str(tmp_path / "head"), nodes=4) as llm:
        result = llm.generate([5, 6, 7], max_new_tokens=24)
        assert result.tokens == llm.generate([5, 6, 7], max_new_tokens=24, drafter="plain").tokens
        assert result.stats.drafted > 0


def test_a_head_is_written_before_it_is_evaluated(
    tiny_folder: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where long texts take more memory than there is in the evaluation, the training is not lost."""

    def evaluate(*args: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr("leapahead.training.run.evaluate", evaluate)
    settings = Settings("medusa", data=str(data), max_new_tokens=4, steps=1, batch=2, held_out=0.3, depths=1)
    with pytest.raises(MemoryError):
        train_head(LLM(str(tiny_folder)), settings, tmp_path / "run", QUIET)
    config, _ = checkpoint.read(tmp_path / "run" / "head")
    assert config.kind == "medusa"


def _logits(module: Any, states: Any, tokens: Any) -> Any:
    if isinstance(module, modules.Medusa):
        return module(states[0, :, :32])
    if isinstance(module, Hydra):
        read = module.read(states[..., :32], torch.arange(4)[None], heads.causal)
        return torch.stack([module.one(k, read[0, 0], torch.tensor([3, 1, 4, 1, 5][: k + 1])) for k in range(5)])
    if isinstance(module, DFlash):
        return heads.of_block(module, states, [3, 1, 4, 1, 5], [])
    given = module.fuse(states) if isinstance(module, modules.Eagle3) else states[..., :32]

    return module.logits(module(tokens, given, torch.arange(4)[None], heads.causal))


# ------------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kind": "dspark"}, "kind='dspark' is not possible; choose one of medusa, eagle, eagle3, peagle, hydra"),
        ({"data": ""}, "give data=FILE of prompts, texts=FILE that an earlier run has written, or both"),
        ({"minutes": 1.0, "steps": 2}, "give either minutes=1 or steps=2, not both"),
        ({"minutes": 0.0}, "minutes=0 is not possible: it must be a finite number above 0"),
        ({"minutes": math.nan}, "minutes=nan is not possible"),
        ({"lr": -1.0}, "lr=-1.0 is not possible: it must be a finite number of at least 0"),
        ({"lr": math.nan}, "lr=nan is not possible"),
        ({"seed": -1}, "seed=-1 is not possible: it must be at least 0"),
        ({"seed": 2**63}, "it must be less than 9223372036854775808"),
        ({"sampled": 1.5}, "sampled=1.5 is not possible: it must be from 0 to 1"),
        ({"batch": 0}, "batch=0 is not possible: it must be at least 1"),
        ({"loss": "mse"}, "loss='mse' is not possible"),
        ({"optimizer": "sgd"}, "optimizer='sgd' is not possible; choose one of adamw, muon"),
        ({"kind": "eagle", "draft_vocab": 9}, "draft_vocab is not possible with eagle"),
        ({"kind": "dflash", "draft_vocab": 9}, "draft_vocab is not possible with dflash"),
        ({"kind": "peagle", "depths": 1}, "depths=1 is not possible with peagle, which has no mask then"),
        ({"kind": "dflash", "depths": 257}, "depths=257 is not possible: it must be from 0 to 256"),
        ({"evaluate": ("x/test.jsonl", "y/test.jsonl")}, "two files have the name 'test'; rename one"),
        ({"layers": (1, 1, 2)}, "layers=1,1,2 is not possible: they must be different"),
        ({"layers": (-99, 1, 2)}, "layers=-99,1,2 is not possible: they must be different, and numbered from 0 on"),
        ({"kind": "medusa", "layers": (1,)}, "layers=1 is not possible with medusa"),
        ({"kind": "hydra++", "layers": (1,)}, r"layers=1 is not possible with hydra\+\+"),
    ],
)
def test_impossible_settings(given: dict[str, Any], message: str) -> None:
    with pytest.raises(LeapaheadError, match=message):
        Settings(**{"kind": "eagle3", "data": "a", **given})


@pytest.mark.parametrize(
    ("given", "optimizer", "rate"),
    [
        ({"kind": "dflash"}, "muon", 3 / 256),
        ({"kind": "dflash2"}, "muon", 3 / 256),
        ({"kind": "dflash", "optimizer": "adamw"}, "adamw", 0.5 / 256),
        ({"kind": "eagle3"}, "muon", 1.5 / 256),
        ({"kind": "eagle3", "optimizer": "adamw"}, "adamw", 0.5 / 256),
        ({"kind": "eagle"}, "muon", 1.5 / 256),
        ({"kind": "peagle"}, "muon", 1.5 / 256),
        ({"kind": "hydra++"}, "adamw", 1e-3),
        ({"kind": "medusa", "optimizer": "muon", "lr": 2e-3}, "muon", 2e-3),
    ],
)
def test_the_usual_optimizer_and_its_rate(given: dict[str, Any], optimizer: str, rate: float) -> None:
    settings = Settings(**{"data": "a", **given}).complete(256)
    assert (settings.optimizer, settings.lr) == (optimizer, rate)


@pytest.mark.parametrize(("kind", "loss"), [("medusa", "soft_ce"), ("hydra", "ce"), ("eagle3", "soft_ce")])
def test_the_usual_loss(kind: str, loss: str) -> None:
    assert Settings(kind, data="a").complete(256).loss == loss
    assert Settings(kind, data="a", loss="tv").complete(256).loss == "tv"


def test_the_help_has_the_usual_rates(leapahead: Any) -> None:
    shown = " ".join(leapahead("train-head", "--help").stdout.split())
    others, of_rows = shown.partition("default: 0.001 for ")[2].split("; of other kinds ")
    adamw, muon = of_rows.split(" with adamw, and with muon ")
    for kind in TRAINED:
        rate = Settings(kind, data="a").complete(1).lr
        if kind in MUON_RATES:
            assert re.search(rf"{rate:g} / hidden size for [^/]*\b{kind}\b", muon)
            assert adamw == f"{Settings(kind, data='a', optimizer='adamw').complete(1).lr:g} / hidden size"
        else:
            assert (rate, kind in others.split(", ")) == (1e-3, True)


@pytest.mark.parametrize("command", ["train-head", "train-probes", "train-draft", "train-cllm", "search-layers"])
def test_what_is_for_transformers_only_has_no_options_of_other_engines(leapahead: Any, command: str) -> None:
    shown = leapahead(command, "--help").stdout
    assert "--dtype" in shown
    assert ("--exact" in shown) == (command in ("train-draft", "search-layers"))
    for option in ("--engine", "--devices", "--ctx-size", "--threads", "--gpu-layers", "--weights", "GGUF", "OpenVINO"):
        assert option not in shown


def test_a_run_is_resumed_with_the_same_settings_only(tmp_path: Path) -> None:
    folder, settings = Folder(tmp_path / "run"), Settings("eagle3", data="a", steps=3)
    with pytest.raises(LeapaheadError, match="holds no training that could be resumed"):
        folder.check(settings, resume=True)
    folder.begin(settings)
    folder.check(settings, resume=True)
    folder.check(Settings("eagle3", data="a", steps=9, lr=1e-3, batch=8, accumulate=2), resume=True)
    with pytest.raises(LeapaheadError, match=r"seed=8 is not possible with --resume, because .* was begun with 0"):
        folder.check(Settings("eagle3", data="a", seed=8), resume=True)
    folder.check(Settings("eagle3", data="b", batch=8), resume=False)  # no text was written yet
    folder.texts.touch()
    with pytest.raises(LeapaheadError, match="is not empty; give a new folder, or go on with --resume"):
        folder.check(settings, resume=False)


def test_a_full_disk_leaves_what_a_run_is_resumed_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(path: Path, text: str, encoding: str) -> int:
        path.touch()
        os.truncate(path, 0)
        raise OSError(errno.ENOSPC, "No space left on device")

    folder, settings = Folder(tmp_path), Settings("eagle3", data="a", steps=3)
    folder.begin(settings)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", write)
        with pytest.raises(LeapaheadError, match="cannot be written: No space left on device"):
            folder.begin(settings)
    folder.check(settings, resume=True)
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


# ---------------------------------------------------------------------------------------------------- the command


FEW = ("--max-new-tokens", "8", "--steps", "4", "--batch", "2", "--held-out", "0.3")


@pytest.mark.slow
def test_the_command_trains_a_head(leapahead: Any, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    given = ("train-head", "--kind", "eagle3", "--data", str(data), "--out", str(out), *FEW, "--features", "disk")
    result = leapahead(*given, "--evaluate", str(data), "--evaluate-prompts", "2")
    assert result.exit_code == 0, result.stderr
    assert "4 steps" in result.stdout
    assert {each.name for each in (out / "head").iterdir()} == {
        *("config.json", "model.safetensors", "README.md", "curves.png"),
    }
    readme = (out / "head" / "README.md").read_text()
    assert f"--kind eagle3 --data {data}" in readme
    assert "| prompts | 2 |" in readme
    for words in ("the text is the model's own.", "in the speculators format", "Tokens per forward, chain of 5"):
        assert words in readme.replace("\n", " ")
    for wrong in (("--head", str(out)), ("-m", str(out))):
        assert f"; a training has written its result to {out / 'head'}" in leapahead("generate", "a", *wrong).stderr
    text = leapahead("generate", "def add", "--max-new-tokens", "8", "-d", "head", "--head", str(out / "head"))
    assert text.stdout == leapahead("generate", "def add", "--max-new-tokens", "8", "-d", "plain").stdout

    again = leapahead(*given)
    assert again.exit_code == 2
    assert again.stderr == f"error: {out} is not empty; give a new folder, or go on with --resume\n"
    changed = leapahead(*given, "--seed", "3", "--resume")
    assert changed.stderr.startswith("error: --evaluate=")
    more = ("--evaluate", str(data), "--evaluate-prompts", "2", "--resume", "--json")
    found = json.loads(leapahead(*given[:-4], "--held-out", "0.3", "--features", "disk", *more).stdout)
    assert found["steps"] == 4


@pytest.mark.slow
def test_the_command_uses_the_texts_of_another_run(leapahead: Any, data: Path, tmp_path: Path) -> None:
    given = ("train-head", "--kind", "medusa", "--data", str(data), "--heads", "2", *FEW)
    assert leapahead(*given, "--out", str(tmp_path / "one")).exit_code == 0
    texts = ("--texts", str(tmp_path / "one" / "texts.jsonl"))
    given = ("train-head", "--kind", "eagle", *texts, *FEW[2:])
    assert leapahead(*given, "--out", str(tmp_path / "two")).exit_code == 0
    for unread, value in (("--max-new-tokens", "8"), ("--sampled", "0.9"), ("--text-batch", "3")):
        refused = leapahead(*given, unread, value, "--out", str(tmp_path / "three"))
        assert refused.stderr.startswith(f"error: {unread}={value} is not possible with --texts={texts[1]}, since")
    assert "prompts of `prompts.jsonl`" in (tmp_path / "two" / "head" / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_an_interrupt_says_how_to_go_on(
    leapahead: Any, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: signal.Signals
) -> None:
    between_steps, asked = screen.interrupts_between_steps, count()

    @contextmanager
    def interrupts() -> Iterator[Callable[[], bool]]:
        with between_steps() as stop:

            def stops() -> bool:
                if next(asked) == 2:
                    signal.raise_signal(sent)
                return stop()

            yield stops

    given = ("train-head", "--kind", "medusa", "--data", str(data), "--out", str(tmp_path / "run"), *FEW)
    with monkeypatch.context() as patch:
        patch.setattr(screen, "interrupts_between_steps", interrupts)
        result = leapahead(*given)
    assert result.exit_code == 130
    assert result.stderr.endswith("interrupted after step 2; the same command with --resume goes on\n")
    resumed = leapahead(*given, "--resume")
    assert resumed.exit_code == 0
    assert "4 steps" in resumed.stdout


def test_trainings_name_their_own_extra(
    leapahead: Any, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = leapahead("train-head", "--kind", "medusa", "--data", str(data), "--out", str(tmp_path / "run"))
    assert result.stderr.endswith('needs matplotlib, which is not installed: pip install "leapahead[train]"\n')
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--data", "missing.jsonl"], "there is no file missing.jsonl"),
        (["--data", os.devnull], f"{os.devnull} is a pipe or a device, and a training reads its files twice; give a"),
        (["--data", "{empty}"], "holds no prompts"),
        (["--data", "{data}", "--evaluate", "missing.jsonl"], "there is no file missing.jsonl"),
        (["--texts", "."], ". is a folder; give a file, such as a training's texts.jsonl"),
        (["--data", "{data}", "--layers", "1,x"], "--layers 1,x is not possible: give numbers of layers"),
        (["--data", "{data}", "--layers", ""], "--layers '' is not possible: give numbers of layers"),
        (["--data", "{data}", "--draft-vocab", "5000"], "--draft-vocab=5000 is not possible, since bundled has"),
        (["--data", "{data}", "--layers", "1,2,9"], "layers; give others, as --layers=I,J,K"),
        (["--data", "{data}", "--heads", "2"], "--heads 2 is not possible with eagle3"),
        (["--data", "{data}", "--kind", "hydra", "--ttt", "2"], "--ttt 2 is not possible with hydra"),
        (["--data", "{data}", "--steps", "2", "--minutes", "1"], "give either --minutes=1 or --steps=2, not both"),
        (["--data", "{data}", "--kind", "medusa", "--layers", "1"], "--layers=1 is not possible with medusa"),
        (["--data", "{data}", "--seed", "-1"], "--seed=-1 is not possible"),
        (["--data", "{data}", "--resume"], "holds no training that could be resumed"),
        (["--data", "{data}", "--max-new-tokens", "600"], "leaves room for --max-new-tokens=600"),
        ([], "give --data=FILE of prompts, --texts=FILE that an earlier run has written, or both"),
    ],
)
def test_what_is_impossible_is_said_in_one_sentence(
    leapahead: Any, data: Path, tmp_path: Path, args: list[str], message: str
) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    given = [each.format(data=data, empty=tmp_path / "empty.jsonl") for each in args]
    result = leapahead("train-head", "--kind", "eagle3", "--out", str(tmp_path / "run"), *given)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "run" / "texts.jsonl").exists(), "no text is decoded before"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--data", "{wrong}"], "wrong.jsonl, line 1 has none of the fields prompt, question, turns, messages"),
        (["--data", "{data}", "--evaluate", "{wrong}"], "wrong.jsonl, line 1 has none of the fields"),
        (["--texts", "{wrong}"], "wrong.jsonl holds no texts of a training run"),
        (["--data", "{data}", "--out", "{wrong}/run"], "wrong.jsonl is no writable folder; give another"),
        (["--data", "{data}", "--lr", "nan"], "'nan' is not a finite number"),
        (["--data", "{data}", "--lr", "0"], "0.0 is not in the range x>0"),
        (["--data", "{data}", "--minutes", "inf"], "'inf' is not a finite number"),
    ],
)
def test_what_is_impossible_is_refused_before_the_model_is_loaded(
    leapahead: Any, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], message: str
) -> None:
    def load(*model: Any, **options: Any) -> Any:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(loading, "load", load)
    (tmp_path / "wrong.jsonl").write_text('{"field": 1}\n')
    given = [each.format(data=data, wrong=tmp_path / "wrong.jsonl") for each in args]
    result = leapahead("train-head", "--kind", "medusa", "--out", str(tmp_path / "run"), *given)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not (tmp_path / "run").exists()


def test_an_unknown_kind(leapahead: Any) -> None:
    result = leapahead("train-head", "--kind", "xpress", "--out", "run")
    assert result.exit_code == 2
    assert "'xpress' is not one of" in result.stderr
