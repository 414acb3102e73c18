"""Online speculative decoding: the draft model learns where it was rejected, in bounded memory, and no text changes."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from safetensors import SafetensorError  # noqa: E402
from seq2seq import build  # noqa: E402
from training_parts import VOCABULARY, model_of, small_model  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
)

from leapahead import LLM  # noqa: E402
from leapahead.core.errors import LeapaheadError  # noqa: E402
from leapahead.core.stats import Stats  # noqa: E402
from leapahead.drafters import learning  # noqa: E402
from leapahead.drafters.learning import Buffer, Rejections  # noqa: E402
from leapahead.models import loading  # noqa: E402
from leapahead.models.transformers import linears, pretrained  # noqa: E402
from leapahead.models.transformers.online import OnlineTraining, Positions  # noqa: E402

PROMPTS = [[1 + (7 * number + place) % 60 for place in range(1 + number % 4)] for number in range(12)]


def chain_llm(**options: Any) -> LLM:
    """Drafts chains of three tokens with a small model of random weights."""
    given = {"draft": small_model(), "nodes": 3, "depth": 3, "chain": True, **options}
    return LLM(model_of(), drafter="draft_model", drafter_cache=False, **given)


def weights_of(llm: LLM) -> list[Any]:
    """A copy of the weights of its draft model."""
    (draft,) = llm._networks["draft"]
    return [each.detach().clone() for each in draft.target.model.parameters()]


@pytest.mark.slow
def test_the_acceptance_rises_on_repeated_prompts_and_no_text_changes() -> None:
    with chain_llm(learn=4, learn_rate=3e-3) as llm:
        rounds = []
        for number in range(5):
            results = llm.generate(PROMPTS, max_new_tokens=24, temperature=0.0)
            rounds.append(sum((result.stats for result in results), Stats()).acceptance_length)
            if number in (0, 4):
                plain = llm.generate(PROMPTS, max_new_tokens=24, drafter="plain")
                assert [result.tokens for result in results] == [result.tokens for result in plain]
        figures = [result.stats.drafter["learning"] for result in results]  # each as they were when its text ended
        assert max(each["updates"] for each in figures) == 15
        assert max(each["positions"] for each in figures) > 100
        assert rounds[-1] > 1.2 * rounds[0]
        sampled = llm.generate(PROMPTS, max_new_tokens=24, temperature=1.0, seed=7)
        expected = llm.generate(PROMPTS, max_new_tokens=24, temperature=1.0, seed=7, drafter="plain")
        assert [result.tokens for result in sampled] == [result.tokens for result in expected]


def test_nothing_is_learned_by_default() -> None:
    with chain_llm() as llm:
        before = weights_of(llm)
        results = llm.generate(PROMPTS, max_new_tokens=16)
        assert all(torch.equal(*pair) for pair in zip(before, weights_of(llm), strict=True))
        assert "learning" not in results[0].stats.drafter


@pytest.mark.slow
def test_the_target_does_not_change() -> None:
    with chain_llm(learn=2, learn_rate=1e-2) as llm:
        target: Any = llm.target
        before = [each.clone() for each in target.model.parameters()]
        drafts = weights_of(llm)
        llm.generate(PROMPTS, max_new_tokens=16)
        assert all(torch.equal(*pair) for pair in zip(before, target.model.parameters(), strict=True))
        assert not all(torch.equal(*pair) for pair in zip(drafts, weights_of(llm), strict=True))


def test_positions_are_those_where_all_drafts_were_rejected() -> None:
    seen: list[Positions] = []
    with chain_llm(learn=1000) as llm:
        drafter: Any = llm.engine.drafter("draft_model", **llm._networks, nodes=3, depth=3, chain=True, learn=1000)
        result = llm.generate([3, 10], max_new_tokens=24)
        seen += drafter.learner.buffer.examples
        target: Any = llm.target
        model = target.model
    (example,) = seen
    assert example.tokens.tolist() == (result.prompt_tokens + result.tokens)[: len(example.tokens)]
    with torch.no_grad():
        logits = model(torch.from_numpy(example.tokens[None].astype(np.int64))).logits[0]
    best = logits.topk(learning.TOP_K)
    for place, following, values in zip(example.places, example.following, example.logits, strict=True):
        np.testing.assert_allclose(values, best.values[place].numpy(), atol=1e-4)
        assert set(following) == set(best.indices[place].tolist())
    # Every step but the last ends at such a position, or with its whole draft accepted.
    whole = result.stats.steps - 1 - len(example.places)
    assert 0 <= whole <= result.stats.accepted // 3


def test_the_last_tokens_up_to_the_last_rejected_position_are_kept() -> None:
    rejections = Rejections()
    nothing = np.zeros(1, dtype=np.int32), np.zeros(1, dtype=np.float32)
    rejections._kept.extend((place, *nothing) for place in (10, 20, 50))
    example = rejections.example(range(100, 160), longest=32)
    assert example is not None
    assert example.tokens.tolist() == list(range(119, 151))
    assert example.places.tolist() == [1, 31]


def test_the_loss_is_the_cross_entropy_at_the_rejected_positions() -> None:
    model: Any = loading.load(small_model()).target
    random = np.random.default_rng(0)
    examples = []
    for length, places in ((9, [2, 5, 8]), (4, [0])):
        following = np.stack([random.permutation(VOCABULARY)[: learning.TOP_K] for _ in places]).astype(np.int32)
        logits = random.normal(size=following.shape).astype(np.float32)
        tokens = random.integers(0, VOCABULARY, length).astype(np.int32)
        examples.append(Positions(tokens, np.array(places, dtype=np.int32), following, logits))
    expected = []
    for example in examples:
        with torch.no_grad():
            found = model.model(torch.from_numpy(example.tokens[None].astype(np.int64))).logits[0]
        for place, following, logits in zip(example.places, example.following, example.logits, strict=True):
            logq = found[place].double().log_softmax(-1).numpy()[following]
            p = np.exp(logits) / np.exp(logits).sum()
            expected.append(-(p * logq).sum())
    assert OnlineTraining(model).loss(examples).item() == pytest.approx(np.mean(expected), rel=1e-5)


@pytest.mark.slow
def test_an_encoder_decoder_draft_model_learns_with_the_input_of_its_encoder(tmp_path: Path) -> None:
    draft, folder = build("bart", seed=3), tmp_path / "learned"
    options: dict[str, Any] = {"nodes": 3, "depth": 3, "chain": True, "learn": 2, "learned": folder}
    with LLM(build("bart"), drafter="draft_model", draft=draft, drafter_cache=False, **options) as llm:
        learner = cast(Any, llm.engine.drafter("draft_model", **llm._networks, **options)).learner
        seen: list[Positions] = []
        learner.buffer.add = seen.append
        llm.generate([[5, 6, 7, 8], [9, 10]], max_new_tokens=8, temperature=1.0, seed=0, ignore_eos=True)
        assert sorted(example.source.tolist() for example in seen) == [[5, 6, 7, 8], [9, 10]]
        expected = []
        for example in seen:
            given = {"decoder_input_ids": torch.from_numpy(example.tokens[None].astype(np.int64))}
            with torch.no_grad():
                logits = draft(torch.from_numpy(example.source[None].astype(np.int64)), **given).logits[0]
            for place, following, values in zip(example.places, example.following, example.logits, strict=True):
                p = torch.from_numpy(values).softmax(-1)
                expected.append(-(p * logits[place].log_softmax(-1)[following.astype(np.int64)]).sum().item())
        assert learner.training.loss(seen).item() == pytest.approx(np.mean(expected), rel=1e-5)
        learner.updates = 1  # so that the model is written
    saved = AutoModelForSeq2SeqLM.from_pretrained(folder)
    assert all(torch.equal(*pair) for pair in zip(saved.parameters(), draft.parameters(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_trainings_of_one_model_go_on_from_each_other(dtype: Any) -> None:
    model: Any = loading.load(small_model().to(dtype)).target
    first, second = OnlineTraining(model, 1e-2), OnlineTraining(model, 1e-9)
    text = Positions(*(np.array(each, dtype=np.int32) for each in ([5, 6], [1], [[7]])), np.zeros((1, 1), np.float32))
    for _ in range(3):
        first.step([text])
    learned = [each.detach().clone() for each in model.model.parameters()]
    second.step([text])
    for before, after in zip(learned, model.model.parameters(), strict=True):
        torch.testing.assert_close(after.detach(), before, atol=1e-6, rtol=0.0)


def test_the_memory_is_bounded() -> None:
    buffer, size = Buffer(), learning.LONGEST
    for number in range(3 * learning.CAPACITY // size):
        places = np.arange(size, dtype=np.int32)
        wide = np.zeros((size, learning.TOP_K))
        example = Positions(
            np.full(size, number, dtype=np.int32), places, wide.astype(np.int32), wide.astype(np.float32)
        )
        buffer.add(example)
        assert buffer.tokens <= learning.CAPACITY
        assert buffer.nbytes < 13e6
    assert [int(each.tokens[0]) for each in buffer.examples][-1] == number  # the newest are kept
    assert len(buffer.take()) == learning.CAPACITY // size
    assert (buffer.tokens, buffer.nbytes) == (0, 0)


@pytest.mark.slow
def test_what_was_learned_is_saved_when_the_engine_is_closed(tmp_path: Path) -> None:
    folder = tmp_path / "learned"
    llm = chain_llm(learn=4, learn_rate=1e-2, learned=str(folder))
    llm.generate(PROMPTS, max_new_tokens=16)
    assert not folder.exists()
    llm.close()
    saved = AutoModelForCausalLM.from_pretrained(folder)
    assert all(torch.equal(*pair) for pair in zip(saved.parameters(), weights_of(llm), strict=True))
    assert json.loads((folder / "learned.json").read_text())["updates"] == 3
    learning.Learned(folder, "another").check()  # which may be replaced


def test_the_folder_of_the_draft_model_itself_may_be_replaced(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    learning.Learned(tmp_path, str(tmp_path / "../" / tmp_path.name)).check()
    for other in ("bundled", str(tmp_path.parent)):
        with pytest.raises(LeapaheadError, match="what it holds would be lost; give a new folder"):
            learning.Learned(tmp_path, other).check()


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        ("head", "the folder is not empty, and what it holds would be lost"),
        ("head/config.json", "it is no folder that can be written .Not a directory."),
        ("head/config.json/below", "it is no folder that can be written .Not a directory."),
        ("/proc/learned", "it is no folder that can be written"),
        (300 * "x", "it is no folder that can be written .File name too long."),
    ],
)
def test_a_folder_that_would_be_lost_or_cannot_be_written_is_refused_first(
    folder: str, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "head" / "config.json"
    file.parent.mkdir()
    file.write_text("{}")
    with pytest.raises(LeapaheadError, match=message):
        chain_llm(learn=1, learned=str(tmp_path / folder))
    assert [each.name for each in tmp_path.rglob("*")] == ["head", "config.json"]


@pytest.mark.slow
def test_a_file_that_comes_in_between_is_named(tmp_path: Path) -> None:
    llm = chain_llm(learn=4, learn_rate=1e-2, learned=str(tmp_path / "learned"))
    llm.generate(PROMPTS, max_new_tokens=16)
    (tmp_path / "learned").write_text("")
    with pytest.raises(LeapaheadError, match="it is no folder that can be written"):
        llm.close()


@pytest.mark.slow
def test_the_folder_stays_when_the_working_directory_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other" / "learned").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    llm = chain_llm(learn=4, learn_rate=1e-2, learned="learned")
    llm.generate(PROMPTS, max_new_tokens=16)
    monkeypatch.chdir(tmp_path / "other")
    llm.close()
    assert (tmp_path / "learned" / "config.json").is_file()
    assert not any((tmp_path / "other" / "learned").iterdir())


@pytest.mark.slow
def test_a_full_disk_leaves_the_folder_as_it_was_and_a_repetition_is_possible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Any, folder: str, **_: Any) -> None:
        (Path(folder) / "config.json").write_text("{}")
        raise SafetensorError("No space left on device")

    folder = tmp_path / "learned"
    for content in ([], ["config.json"]):
        with monkeypatch.context() as patched:
            patched.setattr(PreTrainedModel, "save_pretrained", full)
            llm = chain_llm(learn=4, learn_rate=1e-2, learned=folder)
            llm.generate(PROMPTS, max_new_tokens=16)
            with pytest.raises(LeapaheadError, match="learned cannot be written: No space left on device"):
                llm.close()
        assert sorted(each.name for each in folder.iterdir()) == [*content, "learned.json"]
        (folder / "config.json").write_text("mine")
    assert (folder / "config.json").read_text() == "mine"


def test_shards_of_an_earlier_model_are_removed(tmp_path: Path) -> None:
    old, other = tmp_path / "model-00001-of-00002.safetensors", tmp_path / "README.md"
    for file in (old, other):
        file.touch()
    pretrained.save(small_model(), None, tmp_path)
    assert not old.exists()
    assert other.exists()
    AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.slow
def test_a_folder_that_was_filled_in_between_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    llm = chain_llm(learn=4, learn_rate=1e-2, learned="~/learned")
    llm.generate(PROMPTS, max_new_tokens=16)
    (tmp_path / "learned").mkdir()
    (tmp_path / "learned" / "config.json").write_text("mine")
    with pytest.raises(LeapaheadError, match="what it holds would be lost"):
        llm.close()
    assert (tmp_path / "learned" / "config.json").read_text() == "mine"


@pytest.mark.slow
def test_requests_of_several_threads_learn_together() -> None:
    with chain_llm(learn=2, learn_rate=1e-3) as llm:
        expected = [result.tokens for result in llm.generate(PROMPTS, max_new_tokens=12, drafter="plain")]
        found: dict[int, list[int]] = {}

        def decode(number: int) -> None:
            found[number] = llm.generate(PROMPTS[number], max_new_tokens=12).tokens

        threads = [threading.Thread(target=decode, args=(number,)) for number in range(len(PROMPTS))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [found[number] for number in range(len(PROMPTS))] == expected


def short_model() -> Any:
    """A GPT-2 of random weights with room for 16 tokens, as a draft model."""
    sizes = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)).eval()


def test_a_draft_model_learns_of_texts_longer_than_its_context() -> None:
    with chain_llm(draft=short_model(), learn=1) as llm:
        plain = llm.generate(PROMPTS[0], max_new_tokens=32, drafter="plain")
        result = llm.generate(PROMPTS[0], max_new_tokens=32)
        assert result.tokens == plain.tokens
        assert result.stats.drafter["learning"]["updates"] == 1


def test_a_draft_model_learns_within_inference_mode() -> None:
    """What it has learned there is of use outside, and the other way round."""
    draft = small_model()
    with torch.inference_mode():
        llm = chain_llm(draft=draft, learn=1)
    with llm:
        before = weights_of(llm)
        plain = llm.generate(PROMPTS[0], max_new_tokens=8, drafter="plain")
        for number, mode in enumerate((True, False, True)):
            with torch.inference_mode(mode):
                result = llm.generate(PROMPTS[0], max_new_tokens=8)
            assert result.tokens == plain.tokens
            assert result.stats.drafter["learning"]["updates"] == number + 1
        assert not all(torch.equal(*pair) for pair in zip(before, weights_of(llm), strict=True))


@pytest.mark.filterwarnings("ignore:.* was not trained")
def test_no_text_is_lost_where_learning_fails_with_any_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any, texts: Any) -> Any:
        raise IndexError("index out of range in self")

    monkeypatch.setattr(OnlineTraining, "loss", broken)
    with chain_llm(learn=1) as llm:
        plain = llm.generate(PROMPTS[0], max_new_tokens=16, drafter="plain")
        result = llm.generate(PROMPTS[0], max_new_tokens=16)
        assert result.tokens == plain.tokens
        assert result.stats.drafter["learning"]["updates"] == 0


def failing(texts: Any) -> Any:
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory\nand more")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (failing, r"a step failed \(DefaultCPUAllocator: can't allocate memory\); give learn=0"),
        (lambda texts: torch.tensor(torch.nan), "its loss is not a finite number; give a lower learn_rate"),
    ],
)
def test_no_text_is_lost_where_a_step_of_learning_fails(loss: Any, reason: str) -> None:
    with chain_llm(learn=1, learn_rate=1e-2) as llm:
        plain = llm.generate(PROMPTS[0], max_new_tokens=24, drafter="plain")
        llm.drafter.learner.training.loss = loss  # type: ignore[attr-defined]
        with pytest.warns(UserWarning, match=f"was not trained on 1 text, since {reason}"):
            result = llm.generate(PROMPTS[0], max_new_tokens=24)
        assert result.tokens == plain.tokens
        assert result.stats.drafter["learning"]["updates"] == 0


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    with chain_llm(learn=1000) as llm:
        training, before = llm.drafter.learner.training, weights_of(llm)  # type: ignore[attr-defined]
        weight = next(training._module.parameters())
        training.loss = lambda texts: (weight.abs().sqrt() * 0.0 + (weight - weight.detach()).abs().sqrt()).sum()
        assert not np.isfinite(training.step([]))
        assert all(each.equal(other) for each, other in zip(before, weights_of(llm), strict=True))


@pytest.mark.skipif(not linears.can_pack(), reason="this processor's bfloat16 is not oneDNN's")
def test_a_draft_model_learns_that_was_packed() -> None:
    """As those that are loaded by name in bfloat16 on a CPU are, and their targets."""
    target, draft = model_of().bfloat16(), small_model().bfloat16()
    assert min(linears.pack(target), linears.pack(draft)) > 0
    before = [each.clone() for each in (linears.weight_of(each) for each in draft.modules()) if each is not None]
    with LLM(target, drafter="draft_model", drafter_cache=False, draft=draft, depth=3, learn=2, learn_rate=0.1) as llm:
        results = llm.generate(PROMPTS, max_new_tokens=12)
        assert max(result.stats.drafter["learning"]["updates"] for result in results) > 0
    after = [each for each in (linears.weight_of(each) for each in draft.modules()) if each is not None]
    assert not any(each.equal(other) for each, other in zip(before, after, strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft": "self:skip=1m", "learn": 1}, "cannot learn, since its weights are the target's"),
        ({"learn": -1}, "learn=-1 is not possible"),
        ({"learn": 1, "learn_rate": -1.0}, r"learn_rate=-1\.0 is not possible"),
        ({"learn_rate": 1e-3}, "need learn=N"),
        ({"learned": "folder"}, "need learn=N"),
    ],
)
def test_what_cannot_learn_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(LeapaheadError, match=message):
        chain_llm(**options)


def test_a_draft_model_that_is_the_target_cannot_learn() -> None:
    model = model_of()
    with pytest.raises(LeapaheadError, match="shares weights with the target"):
        LLM(model, drafter="draft_model", draft=model, learn=1)
