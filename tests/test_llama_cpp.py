"""The llama.cpp target by itself: its sequence ids and cells, its files, its refusals, and llama.cpp's own text."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from helpers import GREEDY, Oracle, RandomTrees, Scattered, begin, full_text, run

from leapahead import LLM, ties
from leapahead.bench.prompts import BUNDLED
from leapahead.check import check
from leapahead.cli import main as cli
from leapahead.core.errors import BadParameter, CacheFull, ContextOverflow, LeapaheadError
from leapahead.core.sampling import SamplingParams
from leapahead.core.stats import Stats
from leapahead.core.stop import StopParams
from leapahead.core.tree import TokenTree
from leapahead.core.verify import Verdict
from leapahead.drafters.registry import factory
from leapahead.engine.loop import decode
from leapahead.models import loading
from leapahead.models.base import CHAIN, LOGITS, TOP_K, TREE

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")

import gguf_models
import llama_cpp

from leapahead.models.llama_cpp import model as room
from leapahead.models.llama_cpp.context import Context, LlamaCppOptions
from leapahead.models.llama_cpp.model import LlamaCppTarget, Track

PROMPT = tuple(range(300, 320))
SAMPLED = SamplingParams(temperature=1.0, seed=5)
TREE_OF_SIX = TokenTree(np.array([319, 5, 6, 7, 8, 9]), np.array([-1, 0, 0, 1, 2, 2]))


def load(path: Path | None = None, **options: Any) -> LlamaCppTarget:
    options = {"n_ctx": 512, "n_threads": 1, **options}
    return room.load(path or gguf_models.llama(), LlamaCppOptions(**options))[0]


@pytest.fixture(scope="module")
def shared() -> LlamaCppTarget:
    return load()


@pytest.fixture
def target(shared: LlamaCppTarget) -> LlamaCppTarget:
    shared.forget()
    return shared


def positions(target: LlamaCppTarget) -> dict[int, int]:
    """The last position of every sequence id that holds a cell."""
    memory = target.context.memory
    last = {i: llama_cpp.llama_memory_seq_pos_max(memory, i) for i in range(target.context.n_seq_max)}
    return {i: position for i, position in last.items() if position >= 0}


# ---------------------------------------------------------------------------------------------------- trees and cells


def test_it_can_do_everything(target: LlamaCppTarget) -> None:
    assert target.capabilities == {CHAIN, TREE, LOGITS, TOP_K}
    assert (target.context_length, target.vocab_size, target.max_leaves) == (512, 4096, 64)


def test_every_node_has_the_logits_of_its_own_path(target: LlamaCppTarget) -> None:
    session = target.open(PROMPT, GREEDY)
    rows = target.step([session], [TREE_OF_SIX])[0].logits
    session.close()
    for node in range(6):
        alone = target.open([*PROMPT, *TREE_OF_SIX.path_tokens(node)], GREEDY)
        row = target.step([alone], [TokenTree.root(alone.tokens[-1])])[0].logits[0]
        alone.close()
        np.testing.assert_allclose(rows[node], row, atol=1e-4)


@pytest.mark.parametrize("path", [(0,), (0, 1), (0, 2), (0, 1, 3), (0, 2, 4), (0, 2, 5)])
def test_a_commit_keeps_the_path_and_frees_the_rest(target: LlamaCppTarget, path: tuple[int, ...]) -> None:
    session = target.open(PROMPT, GREEDY)
    target.step([session], [TREE_OF_SIX])
    tokens = (*(int(TREE_OF_SIX.tokens[node]) for node in path[1:]), 77)
    session.commit(Verdict(path, tokens, len(tokens) - 1))
    assert session.track.length == len(PROMPT) - 1 + len(path)
    assert max(positions(target).values()) == session.track.length - 1
    row = target.step([session], [TokenTree.root(77)])[0].logits[0]
    fresh = load()
    expected = fresh.open([*PROMPT, *tokens], GREEDY)
    np.testing.assert_allclose(row, fresh.step([expected], [TokenTree.root(77)])[0].logits[0], atol=1e-4)
    session.close()


def test_all_ids_and_cells_come_back(target: LlamaCppTarget) -> None:
    for seed in range(3):
        params = SamplingParams(temperature=1.0, seed=seed)
        text = full_text(target, PROMPT, params=params)
        generations = [
            begin(target, drafter, PROMPT[i:], params=params)
            for i, drafter in enumerate([RandomTrees(), Oracle(text), factory("lookahead")(), Scattered(text)])
        ]
        list(decode(target, generations))
    target.forget()
    assert positions(target) == {}
    assert sorted(target._free) == list(range(64))


def test_a_step_may_be_taken_again(target: LlamaCppTarget) -> None:
    session = target.open(PROMPT, GREEDY)
    first = target.step([session], [TREE_OF_SIX])[0].logits
    again = target.step([session], [TREE_OF_SIX])[0].logits
    np.testing.assert_allclose(again, first, atol=1e-4)
    session.close()


def test_logits_of_an_earlier_step_are_refused_and_not_another_steps(target: LlamaCppTarget) -> None:
    session = target.open(PROMPT, GREEDY)
    choices = target.step([session], [TREE_OF_SIX])[0]
    kept, known = choices.logits.copy(), choices[0]
    rows = choices.logits
    target.step([session], [TokenTree.chain(319, [4, 4, 4])])
    np.testing.assert_array_equal(rows, kept)  # what was given is the caller's
    assert choices[0] == known
    with pytest.raises(LeapaheadError, match="an earlier step are gone"):
        choices[1]
    session.close()


def test_a_failed_forward_loses_nothing(target: LlamaCppTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(target, None, PROMPT).tokens
    generation = begin(target, factory("lookahead")(), PROMPT)
    loop = decode(target, [generation])
    done = list(next(loop)[1].tokens)
    choices = target.step  # one more forward, whose result never arrives
    with monkeypatch.context() as patch:
        patch.setattr(Context, "decode", lambda *_: (_ for _ in ()).throw(LeapaheadError("no memory")))
        with pytest.raises(LeapaheadError, match="no memory"):
            choices([generation.session], [TokenTree.chain(generation.context.root, [1, 2])])
    for _, step in loop:
        done += step.tokens
    assert done == expected


# ---------------------------------------------------------------------------------------------------- many sessions


def test_sessions_join_and_leave_with_ragged_lengths(target: LlamaCppTarget) -> None:
    llm = LLM(target, drafter="lookahead", max_batch=3)
    prompts = [list(PROMPT[: 3 + 2 * i]) for i in range(8)]
    options: dict[str, Any] = {"temperature": 0.8, "seed": list(range(8)), "max_new_tokens": 30}
    together = llm.generate(prompts, **options)
    alone = [llm.generate(prompt, **{**options, "seed": i}, drafter="plain").tokens for i, prompt in enumerate(prompts)]
    assert [result.tokens for result in together] == alone


def test_prompts_wait_for_room_in_the_cache() -> None:
    target = load(n_ctx=256)
    llm = LLM(target, drafter="lookahead", max_batch=8)
    prompts = [list(range(10 * i + 1, 10 * i + 21)) for i in range(9)]
    texts = [result.tokens for result in llm.generate(prompts, max_new_tokens=60, ignore_eos=True)]
    assert texts == [
        LLM(load(), drafter="plain").generate(prompt, max_new_tokens=60, ignore_eos=True).tokens for prompt in prompts
    ]


def test_a_full_cache_is_refused_before_anything_is_lost() -> None:
    target = load(n_ctx=256)
    expected = run(load(), None, range(1, 181), stop=StopParams(max_new_tokens=20)).tokens
    generation = begin(target, None, range(1, 181), stop=StopParams(max_new_tokens=20))
    with pytest.raises(CacheFull, match=r"KV cache of 256 cells is full.*larger n_ctx"):
        target.open(range(200, 290), GREEDY)
    assert [token for _, step in decode(target, [generation]) for token in step.tokens] == expected


def test_the_last_cell_is_used_and_drafts_shrink_before_it() -> None:
    target = load(n_ctx=256)
    stop = StopParams(max_new_tokens=1000)
    plain = run(target, None, PROMPT, stop=stop)
    assert plain.finish == ("length", None)
    assert len(plain.generation.session.tokens) == 256
    for drafter in (factory("lookahead")(), RandomTrees(nodes=40)):
        assert run(target, drafter, PROMPT, stop=stop).tokens == plain.tokens


def test_more_sequences_than_a_batch_has_tokens_are_refused_before_llama_cpp_ends_the_process() -> None:
    assert load(n_batch=16).max_leaves == 16
    with pytest.raises(BadParameter, match="n_seq_max=32 sequences do not fit a batch of 16 tokens"):
        load(n_batch=16, n_seq_max=32)


def test_too_many_sequences_are_refused_by_name() -> None:
    target = load(n_seq_max=2)
    sessions = [target.open(PROMPT[i:], GREEDY) for i in range(2)]
    with pytest.raises(CacheFull, match=r"all 2 sequence ids in use.*n_seq_max"):
        target.open(PROMPT, GREEDY)
    sessions[0].close()
    target.open(PROMPT, GREEDY)


def test_ids_are_shared_fairly() -> None:
    target = load(n_seq_max=8)
    one = target.open(PROMPT, GREEDY)
    assert target.max_leaves == 8
    wide = TokenTree.from_paths(319, [[i] for i in range(8)])
    target.step([one], [wide])
    one.commit(Verdict((0,), (9,), 0))
    two = target.open(PROMPT[1:], GREEDY)
    assert target.max_leaves == 4
    trees = [TokenTree.from_paths(token, [[i] for i in range(4)]) for token in (9, 319)]
    target.step([one, two], trees)  # the first gives four of its eight back


def test_a_known_prompt_is_not_read_again(target: LlamaCppTarget) -> None:
    target.open(PROMPT, GREEDY).close()
    stats = Stats()
    session = target.open([*PROMPT, 7, 8], GREEDY, stats)
    assert (stats.reused_tokens, stats.prompt_tokens, stats.prefill_forwards) == (19, 22, 1)
    row = target.step([session], [TokenTree.root(8)])[0].logits
    fresh = load()
    expected = fresh.step([fresh.open([*PROMPT, 7, 8], GREEDY)], [TokenTree.root(8)])[0].logits
    np.testing.assert_allclose(row, expected, atol=1e-4)
    session.close()


def test_what_is_kept_for_later_makes_room() -> None:
    target = load(n_ctx=256)
    for first in range(0, 2000, 100):
        run(target, None, range(first, first + 90), stop=StopParams(max_new_tokens=3))
    assert sum(track.length for track, _ in target._idle) <= 256


# ---------------------------------------------------------------------------------------------------- wrong on purpose


LAY = Track.lay


def everyone_sees_everyone(self: Track, tree: TokenTree, known: int = 0) -> list[list[int]]:
    ids = LAY(self, tree, known)
    return [[owner for _, owner in self.laid]] * len(ids)


def the_wrong_leaf(self: Track, path: Any, keep: Any = Track.keep) -> None:
    tree = self.tree
    assert tree is not None
    keep(self, path)
    if len(tree) > 1 and self.held:  # another id becomes the main one
        other = next(iter(self.held))
        self.held[self.main] = self.held.pop(other)
        self.main = other


def one_position_late(self: Context, tokens: Any, places: Any, *rest: Any, decode: Any = Context.decode) -> Any:
    return decode(self, tokens, np.asarray(places) + (np.asarray(places) > 0), *rest)


@pytest.mark.parametrize(
    ("owner", "name", "wrong"),
    [(Track, "lay", everyone_sees_everyone), (Track, "keep", the_wrong_leaf), (Context, "decode", one_position_late)],
)
def test_a_broken_target_is_noticed(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, wrong: Callable[..., Any]
) -> None:
    """By the test at construction, by `check`, or by llama.cpp itself: never in silence."""
    target = load()
    monkeypatch.setattr(owner, name, wrong)
    prompts = [list(PROMPT) * 2, list(range(1, 30)) * 2]
    assert told(lambda: check(target, None, prompts, ["lookahead"], max_new_tokens=40).ok)
    assert told(lambda: TREE in load().capabilities)


def told(right: Callable[[], bool]) -> bool:
    """Whether what is wrong is noticed."""
    try:
        return not right()
    except LeapaheadError as error:
        return "could not decode" in str(error) or "its own logits" in str(error)


# ---------------------------------------------------------------------------------------------------- exact


@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_plain_text_is_llama_cpp_pythons_own(kind: str) -> None:
    path = gguf_models.bundled(kind)
    own = llama_cpp.Llama(str(path), n_ctx=512, n_threads=1, verbose=False)
    llm = LLM(path, drafter="plain", n_ctx=512, n_threads=1)
    for prompt in BUNDLED[:4]:
        tokens = own.tokenize(prompt.encode())
        theirs: list[int] = []
        for token in own.generate(tokens, temp=0.0, top_k=1):
            theirs.append(token)
            if len(theirs) == 48 or token == own.token_eos():
                break
        assert llm.generate(prompt, max_new_tokens=48).tokens == theirs
    own.close()


def test_plain_text_is_transformers_text() -> None:
    ours, theirs = LLM(gguf_models.bundled("f32"), drafter="plain", n_threads=1), LLM(drafter="plain", dtype="float32")
    for prompt in BUNDLED[:3]:
        assert ours.generate(prompt, max_new_tokens=40).text == theirs.generate(prompt, max_new_tokens=40).text


@pytest.mark.parametrize("kind", ["f32", "q8_0", "q4_k_m"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_check_finds_no_mismatch(kind: str, temperature: float) -> None:
    loaded = loading.load(gguf_models.bundled(kind), n_threads=1)
    report = check(
        loaded.target,
        loaded.tokenizer,
        BUNDLED[:3],
        max_new_tokens=32,
        sampling=SamplingParams(temperature=temperature, seed=3),
        eos_token_ids=loaded.eos_token_ids,
        batch=2,
    )
    assert report.ok
    assert {row.name for row in report.drafters if not row.refused} >= {"plain", "jacobi", "prompt_lookup", "lookahead"}


# ---------------------------------------------------------------------------------------------------- the tokenizer


def test_the_tokenizer_is_the_folders() -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(loading.bundled())
    ours = loading.load(gguf_models.bundled("bf16"), n_threads=1).tokenizer
    assert ours is not None
    assert (len(ours), ours.eos_token_id) == (len(theirs), theirs.eos_token_id)
    for text in (*BUNDLED, "  two  spaces\n\n\ttab", "Ünïcödé 日本語 €5 😀", "<|endoftext|>x", " ", "\n", "a" * 200):
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids)
        assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True)


def test_streams_join_to_the_text() -> None:
    llm = LLM(gguf_models.bundled("bf16"), n_threads=1)
    pieces = list(llm.stream("def add(a, b):\n", max_new_tokens=40, temperature=0.9, seed=1))
    assert pieces[-1].result is not None
    assert "".join(piece.text for piece in pieces) == pieces[-1].result.text != ""


# ---------------------------------------------------------------------------------------------------- bad input


def changed(tmp_path: Path, change: Callable[[bytes], bytes]) -> Path:
    path = tmp_path / "changed.gguf"
    path.write_bytes(change(gguf_models.llama().read_bytes()))
    return path


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda data: b"", "not a GGUF file"),
        (lambda data: b"GGML" + data[4:], "not a GGUF file"),
        (lambda data: data[:100], "cannot be loaded: "),
        (lambda data: data[: len(data) // 2], "cannot be loaded: "),
        (lambda data: data[:4] + b"\xff\xff\xff\x7f" + data[8:], "cannot be loaded: "),
        (
            lambda data: data.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0lamaa", 1),
            "unknown model architecture",
        ),
    ],
)
def test_a_broken_file_is_one_sentence(tmp_path: Path, change: Callable[[bytes], bytes], says: str) -> None:
    path = changed(tmp_path, change)
    with pytest.raises(BadParameter) as caught:
        LLM(path)
    assert says in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_impossible_is_refused_by_name(tmp_path: Path) -> None:
    path = gguf_models.llama()
    for wrong, says in (
        (lambda: LLM(tmp_path / "none.gguf"), "there is no file"),
        (lambda: LLM(path, dtype="float32"), "dtype='float32' is not possible with a GGUF file"),
        (lambda: LLM(path, device="cuda"), "device='cuda' is not possible with a GGUF file"),
        (lambda: LLM(path, n_ctx=-1), "n_ctx=-1 is not possible"),
        (lambda: LLM(path, n_threads=0), "n_threads=0 is not possible"),
        (lambda: LLM(path, n_seq_max=1000), "n_seq_max=1000 is not possible"),
        (lambda: LLM(path, type_k="q3"), "type_k='q3' is not possible"),
        (lambda: LLM(n_ctx=512), "n_ctx can be set for a GGUF file only"),
        (lambda: LLM(path, wobble=3), "wobble"),
    ):
        with pytest.raises(BadParameter, match=says):
            wrong()


def test_prompts_are_checked(target: LlamaCppTarget) -> None:
    with pytest.raises(BadParameter, match="prompt is empty"):
        target.open([], GREEDY)
    with pytest.raises(BadParameter, match="token 5000 is outside the vocabulary of 4096"):
        target.open([1, 5000], GREEDY)
    with pytest.raises(ContextOverflow, match="512 tokens and the context 512"):
        target.open([1] * 512, GREEDY)


def test_the_names_of_the_options_are_the_dataclass() -> None:
    assert set(loading.LLAMA_CPP_OPTIONS) == set(LlamaCppOptions.__dataclass_fields__)


def test_its_log_goes_to_our_logger_and_not_to_the_screen(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "leapahead.llama_cpp"):
        load()
    assert any("llama" in record.getMessage() for record in caplog.records)
    load()
    said = capfd.readouterr()
    assert (said.out, said.err) == ("", "")


# ---------------------------------------------------------------------------------------------------- the command line


def invoke(*words: str, stdin: str | None = None) -> Any:
    return CliRunner().invoke(cli, words, input=stdin)


def test_generate_from_a_file() -> None:
    path = str(gguf_models.bundled("q8_0"))
    words = ("generate", "-m", path, "--threads", "1", "-c", "512", "--max-new-tokens", "20", "--json", "def f(x):\n")
    result = invoke(*words)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["target"], found["drafter"], len(found["tokens"])) == (Path(path).name, "auto", 20)


def test_chat_by_the_template_of_the_file() -> None:
    words = ("chat", "-m", str(gguf_models.bundled("q8_0")), "--threads", "1", "--max-new-tokens", "8", "-q")
    result = invoke(*words, stdin="hello\n")
    assert result.exit_code == 0, result.output
    assert result.stdout.strip()


def test_check_from_a_file() -> None:
    words = ("check", "-m", str(gguf_models.bundled("f32")), "--threads", "1", "--limit", "2", "--max-new-tokens", "16")
    result = invoke(*words, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["ok"]


def test_a_broken_file_on_the_command_line(tmp_path: Path) -> None:
    path = changed(tmp_path, lambda data: data[:5000])
    result = invoke("generate", "-m", str(path), "x")
    assert result.exit_code == 2
    assert result.output.count("\n") == 1
    assert result.output.startswith("error: ")


def test_a_tie_is_judged_where_two_such_sequences_do_not_fit() -> None:
    """A prompt of more than half the cache: the sequence in question leaves, and the ways are computed without it."""
    loaded = loading.load(gguf_models.bundled("q8_0"), n_threads=1, n_ctx=256)
    prompt = [5 + i % 90 for i in range(200)]
    found = ties.measure(loaded.target, prompt, [7, 8], (3, 4), SamplingParams(), 1)
    assert found.noise > 0
    quick = ties.measure(loaded.target, prompt, [7, 8], (3, 4), SamplingParams(), 1, thorough=False)
    assert quick.gap == pytest.approx(found.gap, abs=0.2)
    loaded.target.open(prompt, SamplingParams()).close()  # nothing was left open


@pytest.mark.parametrize("n_batch", [512, 16])
def test_what_is_kept_of_the_prompt_is_what_the_target_would_say_there(n_batch: int) -> None:
    target = load(n_ctx=256, n_batch=n_batch)
    rng = np.random.default_rng(3)
    prompt = rng.integers(3, target.vocab_size - 1, 60).tolist()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("leapahead.models.llama_cpp.model.PROMPT_ROWS", 24)
        session = target.open(prompt, SamplingParams(), top_k=4)
    kept = session.prompt_top_k
    assert kept is not None
    assert kept.tokens.tolist() == prompt[-25:-1]
    assert kept.following.shape == kept.logits.shape == (24, 4)
    session.close()
    for index in (0, 11, 23):
        target.forget()
        alone = target.open(prompt[: 36 + index], SamplingParams())
        logits = target.step([alone], [TokenTree.root(prompt[35 + index])])[0].logits[0]
        best = np.argsort(-logits, kind="stable")[:4]
        assert kept.following[index].tolist() == best.tolist()
        assert kept.logits[index] == pytest.approx(logits[best], abs=1e-3)
        alone.close()
