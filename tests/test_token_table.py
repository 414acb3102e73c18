"""The token table: its rows against the target's own, its file against damage, and what drafts from it."""

from __future__ import annotations

import copy
import errno
import json
import os
from collections.abc import Sequence
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest
from helpers import GREEDY, Spelling, assert_same_text

from leapahead import LLM, token_table
from leapahead.core.errors import BadParameter, Refused
from leapahead.core.sampling import Sampler, SamplingParams
from leapahead.core.tree import TokenTree
from leapahead.drafters import token_table as files
from leapahead.drafters.planned import Planned
from leapahead.drafters.sources.token_table import TableSource
from leapahead.drafters.token_table import TokenTable, place, stored
from leapahead.models import loading
from leapahead.models.base import CHAIN, TOP_K, TREE, Capture, Target, read_prompt
from leapahead.models.toy import ToyTarget
from leapahead.planner.draft import SequenceView
from leapahead.planner.source import Source

VOCAB = 24


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LEAPAHEAD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def after(target: Target, context: Sequence[int], token: int, k: int) -> list[int]:
    """The target's likeliest tokens after a prompt of a context and a token, by plain decoding's forward."""
    session = target.open([*context, token], GREEDY)
    read_prompt(target, session)
    (choices,) = target.step([session], [TokenTree.root(token)], capture=Capture(top_k=k))
    following = choices.top_k(k)[0][0].tolist()
    session.close()
    return following


def toy(**options: Any) -> ToyTarget:
    return ToyTarget(VOCAB, **{"order": 1, "seed": 3, **options})


@pytest.fixture
def table() -> TokenTable:
    return token_table.build(toy(), k=6)


# ---------------------------------------------------------------------------------------------------------- rows


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_leaves": 5},
        {"max_nodes": 4},
        {"max_nodes": 1},
        {"capabilities": frozenset({CHAIN, TOP_K})},
    ],
)
def test_a_row_has_the_targets_likeliest_tokens_after_the_context_and_the_token(options: dict[str, Any]) -> None:
    target = toy(order=3, **options)
    told: list[tuple[int, int]] = []
    table = token_table.build(target, k=6, context=(7, 2), progress=lambda _, done, total: told.append((done, total)))
    for token in range(VOCAB):
        logits = target.row(((0, 7), (1, 2), (2, token)))
        best = np.argsort(-logits)[:6]
        assert table.tokens[token].tolist() == best.tolist()
        expected = np.log(np.exp(logits[best]) / np.exp(logits[best]).sum())
        np.testing.assert_allclose(table.logp[token].astype(float), expected, atol=2e-3)
    assert table.context == (7, 2)
    assert told[-1] == (VOCAB, VOCAB)
    assert told == sorted(set(told))


def test_no_more_tokens_are_kept_than_there_are() -> None:
    table = token_table.build(toy(), k=1000)
    assert table.tokens.shape == (VOCAB, VOCAB)
    assert (np.sort(table.tokens, axis=1) == np.arange(VOCAB)).all()
    assert table.nbytes == token_table.size(VOCAB, 1000) == VOCAB * VOCAB * 6


class Banning(ToyTarget):
    """Tokens that cannot be chosen have the logit -inf, as in padded vocabularies."""

    def _compute_row(self, key: tuple[int, ...]) -> npt.NDArray[np.float64]:
        found = super()._compute_row(key)
        found[3:] = -np.inf
        return found


def test_log_probabilities_are_finite(tmp_path: Path) -> None:
    table = token_table.build(Banning(VOCAB), k=6)
    assert np.isfinite(table.logp).all()
    assert set(table.tokens[:, :3].ravel().tolist()) == {0, 1, 2}
    TokenTable.load(table.save(tmp_path / "table"))  # and the file is accepted


class Particular(ToyTarget):
    """Predicts well only where its text begins with one of some tokens."""

    begins: ClassVar[set[int]] = {0}

    def _compute_row(self, key: tuple[int, ...]) -> npt.NDArray[np.float64]:
        known = key[-1:] if key[0] in self.begins else (key[0], *key)
        return super()._compute_row(known)


class Words(Spelling):
    """Every character is a token; the full stop is token 22, and texts begin with token 0."""

    bos_token_id: ClassVar[int | None] = 0

    def __init__(self) -> None:
        super().__init__(str)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        first = [0] if add_special_tokens and self.bos_token_id is not None else []
        return [*first, *(22 if char == "." else 1 + ord(char) % 20 for char in text)]


class WithoutBegin(Words):
    bos_token_id: ClassVar[int | None] = None


@pytest.mark.parametrize(("begins", "expected"), [({0}, [0, 22]), ({0, 22}, [22])])
def test_the_context_is_the_one_that_predicts_a_text_better(begins: set[int], expected: list[int]) -> None:
    class Target(Particular):
        pass

    Target.begins = begins
    tokenizer: Any = Words()
    assert token_table.best_context(Target(VOCAB, order=400), tokenizer) == expected


def test_the_context_without_a_choice() -> None:
    assert token_table.best_context(toy(), None) == [0]
    tokenizer: Any = WithoutBegin()
    assert token_table.best_context(toy(), tokenizer) == [22]


def test_what_is_not_possible_is_refused_by_name() -> None:
    with pytest.raises(BadParameter, match="k=0 is not possible"):
        token_table.build(toy(), k=0)
    with pytest.raises(BadParameter, match="token 99 is outside the vocabulary of 24"):
        token_table.build(toy(), context=(99,))
    with pytest.raises(Refused, match=r"a token table needs top_k from the target, .*; decode without one"):
        token_table.build(toy(capabilities=frozenset({CHAIN, TREE})))


# --------------------------------------------------------------------------------------------------------- files


def test_a_stored_table_is_found_by_the_weights(cache: Path) -> None:
    target = toy()
    assert stored(target) is stored(None) is None
    file = token_table.make(target, k=6)
    assert file == place(target.weights_digest())
    assert file.is_relative_to(cache)
    found = stored(toy())
    assert found is not None
    built = token_table.build(target, k=6)
    np.testing.assert_array_equal(found.tokens, built.tokens)
    np.testing.assert_array_equal(found.logp, built.logp)
    assert (found.context, found.weights, found.model, found.path) == ((0,), built.weights, target.info.name, file)
    assert found.tokens.flags.writeable is found.logp.flags.writeable is False
    assert stored(toy(seed=4)) is None
    assert stored(toy(sharpness=3.0)) is None
    place(toy(seed=4).weights_digest()).write_bytes(file.read_bytes())  # a file that was renamed
    assert stored(toy(seed=4)) is None
    assert [each.name for each in file.parent.iterdir() if each.name.startswith(".")] == []


def changed(data: bytes, **values: Any) -> bytes:
    """A file with other values in its header."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length]) | values
    new = json.dumps(header).encode()
    return len(new).to_bytes(8, "little") + new + data[8 + length :]


def with_array(data: bytes, offset: int, value: bytes) -> bytes:
    at = 8 + int.from_bytes(data[:8], "little") + offset
    return data[:at] + value + data[at + len(value) :]


DAMAGES = {
    "empty": lambda data: b"",
    "text": lambda data: b"a text that is no table at all",
    "truncated": lambda data: data[:-1],
    "truncated in its header": lambda data: data[:40],
    "longer": lambda data: data + b"\0",
    "endless header": lambda data: (1 << 62).to_bytes(8, "little") + data[8:],
    "nested header": lambda data: (60000).to_bytes(8, "little") + b"[" * 60000,
    "no object": lambda data: (4).to_bytes(8, "little") + b"null",
    "other format": lambda data: changed(data, __metadata__={"format": "leapahead token table 99"}),
    "no metadata": lambda data: changed(data, __metadata__=None),
    "lost metadata": lambda data: changed(data, __metadata__={"format": files.FORMAT}),
    "odd context": lambda data: changed(
        data, __metadata__={"format": files.FORMAT, "model": "", "weights": "", "context": "x"}
    ),
    "huge": lambda data: changed(data, tokens={"dtype": "I32", "shape": [1 << 30, 6], "data_offsets": [0, 6 << 32]}),
    "flat": lambda data: changed(data, tokens={"dtype": "I32", "shape": [144], "data_offsets": [0, 576]}),
    "words": lambda data: changed(data, tokens={"dtype": "I32", "shape": ["24", 6], "data_offsets": [0, 576]}),
    "negative": lambda data: changed(data, tokens={"dtype": "I32", "shape": [-24, -6], "data_offsets": [0, 576]}),
    "other type": lambda data: changed(data, tokens={"dtype": "I64", "shape": [24, 6], "data_offsets": [0, 1152]}),
    "overlap": lambda data: changed(data, logp={"dtype": "F16", "shape": [24, 6], "data_offsets": [0, 288]}),
    "token outside": lambda data: with_array(data, 0, (24).to_bytes(4, "little")),
    "negative token": lambda data: with_array(data, 8, b"\xff\xff\xff\xff"),
    "NaN": lambda data: with_array(data, 576, b"\x00\x7e"),
    "probability above 1": lambda data: with_array(data, 576, b"\x00\x3c"),
}


def test_a_symbolic_link_stays_and_a_special_file_is_never_replaced(table: TokenTable, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert table.save(tmp_path / "link").samefile(tmp_path / "file")
    assert (tmp_path / "link").is_symlink()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadParameter, match="pipe cannot be written, because it is a device or another special file"):
        table.save(tmp_path / "pipe")


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_refused_in_one_sentence_and_drafting_goes_on(damage: str) -> None:
    target = toy()
    file = token_table.make(target, k=6)
    file.write_bytes(DAMAGES[damage](file.read_bytes()))
    with pytest.raises(BadParameter, match=r"is not a valid token table: .*; replace it") as caught:
        TokenTable.load(file)
    assert "\n" not in str(caught.value)
    with pytest.warns(UserWarning, match="Drafting goes on without it"):
        assert stored(target) is None
    token_table.make(target, k=6)  # and it is replaced
    assert stored(target) is not None


def test_a_cache_folder_that_cannot_be_entered_has_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEAPAHEAD_CACHE", "/" + "n" * 300)  # as for a folder without permission, `stat` fails
    assert stored(toy()) is None


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(BadParameter, match="cannot be read"):
        TokenTable.load(tmp_path / "nothing")
    with pytest.raises(BadParameter, match="cannot be read"):
        TokenTable.load(tmp_path)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    table: TokenTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = table.save()
    before = file.read_bytes()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(BadParameter, match=r"No space left on device\); set LEAPAHEAD_CACHE"):
        token_table.make(toy(), k=3)
    with pytest.raises(BadParameter, match=r"No space left on device\); name another file"):
        table.save(file)
    assert [each.name for each in file.parent.iterdir()] == [file.name]
    assert file.read_bytes() == before


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_computed(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    cache.write_text("a file where the folder should be")
    with pytest.raises(BadParameter, match="set LEAPAHEAD_CACHE to another folder"):
        token_table.make(toy(), progress=lambda _, done, total: told.append(done))
    monkeypatch.setenv("LEAPAHEAD_CACHE", str(tmp_path / "other"))
    monkeypatch.setattr(files, "disk_usage", lambda folder: SimpleNamespace(free=10))
    with pytest.raises(BadParameter, match=r"it takes 0\.0 MB, and 0\.0 MB are free"):
        token_table.make(toy(), progress=lambda _, done, total: told.append(done))
    monkeypatch.undo()
    monkeypatch.setenv("LEAPAHEAD_CACHE", str(tmp_path / "other"))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(BadParameter, match="its folder is not writable"):
        token_table.make(toy(), progress=lambda _, done, total: told.append(done))
    assert told == []


def test_an_interrupt_stores_nothing_and_leaves_the_target_usable(cache: Path) -> None:
    target = toy(max_leaves=5)

    def interrupt(what: str, done: int, total: int) -> None:
        if done > 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        token_table.make(target, k=6, progress=interrupt)
    assert [each for each in cache.rglob("*") if each.is_file()] == []
    assert token_table.make(target, k=6).is_file()


def test_writers_at_once_leave_a_whole_file(table: TokenTable) -> None:
    other = token_table.build(toy(), k=3)
    threads = [Thread(target=each.save) for each in [table, other] * 8]
    file = table.save()
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert TokenTable.load(file).k in (3, 6)
    for thread in threads:
        thread.join()
    assert [each.name for each in file.parent.iterdir()] == [file.name]


class Anonymous(ToyTarget):
    """Its weights cannot be read."""

    def weights_digest(self) -> str:
        return ""


def test_a_target_that_does_not_identify_its_weights(tmp_path: Path) -> None:
    target = Anonymous(VOCAB)
    assert stored(target) is None
    with pytest.raises(Refused, match="cannot be stored, because its weights cannot be read"):
        token_table.make(target)
    table = token_table.build(target)
    with pytest.raises(BadParameter, match="name a file for its table"):
        table.save()
    assert TokenTable.load(table.save(tmp_path / "table")).k == VOCAB


# ------------------------------------------------------------------------------------------------------- weights


def test_the_digest_of_a_module_tells_a_fine_tune(tiny_model: Any) -> None:
    torch = pytest.importorskip("torch")
    from leapahead.models.transformers import weights

    own = weights.digest(tiny_model)
    assert len(own) == 16
    assert weights.digest(copy.deepcopy(tiny_model)) == own
    assert weights.digest(copy.deepcopy(tiny_model).to(torch.bfloat16)) == own
    tuned = copy.deepcopy(tiny_model)
    with torch.no_grad():
        tuned.model.layers[1].self_attn.q_proj.weight.mul_(1.02)
    assert weights.digest(tuned) != own
    assert weights.digest(copy.deepcopy(tiny_model).to("meta")) == ""


def test_the_digest_of_a_file_tells_a_fine_tune(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    from gguf_models import llama

    from leapahead.models.llama_cpp.file import weights_digest

    file = llama()
    own = weights_digest(file)
    assert len(own) == 16
    tuned = tmp_path / "tuned.gguf"
    data = bytearray(file.read_bytes())
    data[-200:] = bytes(200)
    tuned.write_bytes(data)
    assert weights_digest(tuned) not in ("", own)
    assert weights_digest(tmp_path / "nothing.gguf") == ""
    tuned.write_bytes(data[:100])
    assert weights_digest(tuned) == ""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["transformers", "llama.cpp"])
def test_the_tables_of_real_engines_have_the_rows_of_their_own_forwards(kind: str, tiny_folder: Path) -> None:
    if kind == "llama.cpp":
        pytest.importorskip("llama_cpp")
        from gguf_models import llama

        model = str(llama())
    else:
        model = str(tiny_folder)
    with LLM(model) as llm:
        table = token_table.build(llm.target, llm.tokenizer, k=4)
        for token in (0, 5, len(table.tokens) - 1):
            assert table.tokens[token].tolist() == after(llm.target, table.context, token, 4)
        assert llm.generate("def add", max_new_tokens=4).tokens  # nothing of it is left in the cache


def test_the_bundled_model_brings_its_table() -> None:
    """Made anew by `research.train.tiny`, or by `token_table.build`, when the model changes."""
    loaded = loading.load()
    table = stored(loaded.target)
    assert table is not None
    assert table.path is not None
    assert table.path.parent == Path(loading.bundled())
    assert table.k == token_table.K
    assert list(table.context) == token_table.best_context(loaded.target, loaded.tokenizer)
    following = [after(loaded.target, table.context, token, 4) for token in range(100, 132)]
    assert (table.tokens[100:132, :4] == following).mean() > 0.98  # equal up to ties


# -------------------------------------------------------------------------------------------------------- source


def view_of(*tokens: int, params: SamplingParams = GREEDY) -> SequenceView:
    return SequenceView(Sampler(params, list(tokens), VOCAB), None)


def test_the_source_proposes_the_row_of_the_last_token(table: TokenTable) -> None:
    source = TableSource(table)
    state = source.root(view_of(4, 9))
    assert [each.token for each in source.candidates(state, 4)] == table.tokens[9, :4].tolist()
    assert [each.token for each in source.candidates(source.follow(state, 2), 9)] == table.tokens[2].tolist()
    assert source.candidates(state, 1)[0].logp == pytest.approx(float(table.logp[9, 0]))
    assert source.figures() == {"tokens": VOCAB, "k": 6}


def test_the_source_finds_what_the_seed_prefers(table: TokenTable) -> None:
    source, sequence = TableSource(table), view_of(4, 9, params=SamplingParams(temperature=1.0, seed=5))
    scores = sequence.scores(2, table.tokens[9], table.logp[9].astype(float))
    found = source.seed_aware_candidates(9, 2, lambda tokens, logp: sequence.scores(2, tokens, logp))
    assert {each.token for each in found} == set(table.tokens[9][np.argsort(-scores)[:2]].tolist())
    assert len(source.seed_aware_candidates(9, 50, lambda tokens, logp: sequence.scores(2, tokens, logp))) == 6


class OfTable(Planned):
    """Drafts from a table alone."""

    name: ClassVar[str] = "of_table"

    def __init__(self, table: TokenTable) -> None:
        super().__init__(nodes=6)
        self.table = table

    def make_sources(self, sequence: SequenceView | None) -> list[Source]:
        return [TableSource(self.table)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_is_plain_decodings_whatever_the_table_says(table: TokenTable, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=1)
    right = assert_same_text(toy(), OfTable(table), params=params)
    rng = np.random.default_rng(0)
    wrong = TokenTable(rng.integers(0, VOCAB, (VOCAB, 6), dtype=np.int32), np.zeros((VOCAB, 6), np.float16))
    assert_same_text(toy(), OfTable(wrong), params=params)
    assert right.stats.accepted > 0


@pytest.mark.parametrize("tables", [False, True])
def test_auto_uses_a_stored_table_and_says_so(tables: bool) -> None:
    target: Target = toy()
    if tables:
        token_table.make(target, k=6)
    found = assert_same_text(target, "auto", params=GREEDY)
    assert ("table" in found.stats.drafter) == tables
