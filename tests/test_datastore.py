"""The datastore: searching it, its file, building it from a corpus, and the texts that are decoded with it."""

from __future__ import annotations

import errno
import json
import os
import random
from pathlib import Path
from typing import Any

import gguf_models
import numpy as np
import pytest
from click.testing import CliRunner, Result
from helpers import close_folder
from hypothesis import given, settings
from hypothesis import strategies as st

from leapahead import LLM, BadParameter
from leapahead.cli import main
from leapahead.core.sampling import Sampler, SamplingParams
from leapahead.core.text import fingerprint
from leapahead.drafters.sources import corpus as corpus_module
from leapahead.drafters.sources.corpus import Corpus, build, suffix_array, write
from leapahead.drafters.sources.datastore import (
    LONGEST,
    MAX_COUNTED,
    ORDERED,
    SHORTEST,
    Datastore,
    Header,
    Interval,
    Store,
)
from leapahead.models import loading
from leapahead.models.toy import ToyTarget
from leapahead.planner.draft import SequenceView

SMALL, LARGE = 12, 70_000  # vocabularies; the second takes four bytes a token
WORDS = ["the", "cat", "sat", "on", "mat", "and", "dog", "log", "while", "rain", "fell"]

Documents = list[list[int]]


def stored(path: Path, documents: Documents, vocab_size: int = SMALL) -> Store:
    header = Header.of("toy", "0" * 16, vocab_size, sum(map(len, documents)), len(documents))
    write(path, header, documents)
    return Store(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("datastore")


def occurrences(documents: Documents, pattern: list[int]) -> list[tuple[int, ...]]:
    """What follows each: the rest of its document."""
    n = len(pattern)
    return [tuple(ids[at + n :]) for ids in documents for at in range(len(ids) - n + 1) if ids[at : at + n] == pattern]


def text_of(seed: int, sentences: int) -> str:
    rng = random.Random(seed)
    return "\n".join(" ".join(rng.choices(WORDS, k=8)) + "." for _ in range(sentences))


# --------------------------------------------------------------------------------------------------------- search

ids = st.integers(0, 3)


@settings(max_examples=80)
@given(
    documents=st.lists(st.lists(ids, min_size=1, max_size=30), min_size=1, max_size=5),
    pattern=st.lists(ids, max_size=20),
    ahead=st.lists(ids, max_size=8),
    vocab_size=st.sampled_from([4, SMALL, LARGE]),
)
def test_the_longest_match_is_found_and_narrowed(
    folder: Path, documents: Documents, pattern: list[int], ahead: list[int], vocab_size: int
) -> None:
    """Against looking everywhere, documents' borders included."""
    store = stored(folder / "found", documents, vocab_size)
    lengths = [n for n in range(SHORTEST, min(LONGEST, len(pattern)) + 1) if occurrences(documents, pattern[-n:])]
    place = store.longest(pattern)
    assert (place.length if place is not None else None) == (lengths[-1] if lengths else None)
    matched = pattern[-lengths[-1] :] if lengths else []
    for token in [*ahead, None]:
        if place is None:
            return
        rests = occurrences(documents, matched)
        assert (place.high - place.low, place.length) == (len(rests), len(matched))
        after, looked_at = store.after(place)
        assert looked_at == len(rests)
        assert dict(after) == {t: n for t in range(4) if (n := sum(rest[:1] == (t,) for rest in rests))}
        if token is not None:
            place = store.narrowed(place, token)
            matched = [*matched, token]
            assert (place is None) == (not occurrences(documents, matched))


@settings(max_examples=40)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=60), st.sampled_from([1, 2, 7, 33, ORDERED]))
def test_places_are_in_order_as_far_as_is_asked(text: list[int], depth: int) -> None:
    for scale in (1, 40_000):  # keys of many tokens, and of few
        order = suffix_array(np.array(text) * scale, depth).tolist()
        assert sorted(order) == list(range(len(text)))
        begins = [text[at : at + depth] for at in order]
        assert begins == sorted(begins)


def test_a_corpus_that_repeats_itself_is_followed_as_far_as_it_is_in_order(folder: Path) -> None:
    store = stored(folder / "same", [[5] * 3000, [5] * 100 + [6]])
    place = store.longest([5] * 40)
    assert place == Interval(place.low, place.high, LONGEST)
    assert place.high - place.low == 3000 - 15 + 100 - 15
    for length in range(LONGEST + 1, ORDERED + 1):
        place = store.narrowed(place, 5)
        assert place is not None
        assert place.length == length
    assert store.narrowed(place, 5) is None  # as far as it goes
    after, looked_at = store.after(place)
    assert (set(after), looked_at) == ({5}, MAX_COUNTED) or set(after) == {5, 6}


def test_a_match_is_carried_from_step_to_step(folder: Path) -> None:
    """What `root` finds, which begins where the last step ended, is what a search from nothing finds."""
    rng = random.Random(3)
    documents = [[rng.randrange(5) for _ in range(400)] for _ in range(3)]
    store = stored(folder / "carried", documents)
    sequence = SequenceView(Sampler(SamplingParams(), [1, 2], SMALL))
    source = Datastore(store)
    source.begin(sequence)
    lengths = set()
    for _ in range(200):
        piece = rng.choice(documents)[(at := rng.randrange(390)) : at + rng.randrange(1, 9)]
        sequence.tokens.extend(piece if rng.random() < 0.5 else [rng.randrange(SMALL)])
        place = source.root(sequence)
        assert place == store.longest(sequence.tokens)
        lengths.add(place.length if place is not None else 0)
    assert {0, 3, 4, 5, 6} <= lengths


def test_counts_are_ordered_and_told(folder: Path) -> None:
    store = stored(folder / "counted", [[1, 2, 3], [1, 2, 3], [1, 2, 4], [1, 2]])
    sequence = SequenceView(Sampler(SamplingParams(), [7, 1, 2], SMALL))
    source = Datastore(store)
    source.begin(sequence)
    place = source.root(sequence)
    assert place is not None
    found = source.candidates(place, 8)
    assert [(each.token, round(float(np.exp(each.logp)), 6)) for each in found] == [(3, 0.5), (4, 0.25)]
    assert len(source.candidates(place, 1)) == 1
    assert source.follow(place, 9) is None


def test_ids_that_the_file_cannot_have_are_no_match(folder: Path) -> None:
    store = stored(folder / "ids", [[1, 2, 3, 1, 2]])
    assert store.longest([60_000, 1, 2]) == store.longest([1, 2])
    assert store.longest([1, 2, 70_000]) is None
    place = store.longest([1, 2])
    assert place is not None
    assert store.narrowed(place, 0xFFFF) is None  # the separator


# ----------------------------------------------------------------------------------------------------------- file


@pytest.mark.parametrize(("vocab_size", "dtype"), [(SMALL, "uint16"), (0xFFFF, "uint16"), (0x10000, "uint32")])
def test_a_file_says_what_was_written(folder: Path, vocab_size: int, dtype: str) -> None:
    last = vocab_size - 1
    store = stored(folder / "said", [[1, 2, last], [3]], vocab_size)
    assert store.header == Header("toy", "0" * 16, vocab_size, 4, 2, dtype, "uint32")
    end = store.header.separator
    assert store.text.tolist() == [1, 2, last, end, 3, end]
    assert store.order.tolist() == [0, 1, 4, 2]
    assert store.largest == last
    assert store.size == (folder / "said").stat().st_size


def test_large_indices_take_eight_bytes() -> None:
    header = Header.of("big", "0" * 16, 150_000, 1 << 32, 1000)
    assert (header.dtype, header.places) == ("uint32", "uint64")
    assert header.layout(64)[1] == 64 + 12 * (1 << 32) + 4000 + 32 + 8 * 150_001  # 32 to align the places


def rewritten(data: bytes, **changes: Any) -> bytes:
    length = int.from_bytes(data[12:16], "little")
    header = {**json.loads(data[16 : 16 + length]), **changes}
    packed = json.dumps({name: value for name, value in header.items() if value is not None}).encode()
    whole = data[:12] + len(packed).to_bytes(4, "little") + packed
    return whole.ljust(-(-len(whole) // 64) * 64, b"\0") + data[-(-(16 + length) // 64) * 64 :]


def test_an_unchanged_header_is_valid(folder: Path) -> None:
    """So the tests below fail because of what they change."""
    stored(folder / "whole", [[1, 2, 3]])
    (folder / "again").write_bytes(rewritten((folder / "whole").read_bytes()))
    assert Store(folder / "again").header.tokens == 3


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda data: b"", "does not begin with LEAPDATA"),
        (lambda data: b"GGUF" + data[4:], "does not begin with LEAPDATA"),
        (lambda data: data[:8] + b"\x02" + data[9:], "its version is 2, and this version of leapahead reads version 1"),
        (lambda data: data[:12] + b"\xff\xff\xff\xff" + data[16:], "its header is damaged"),
        (lambda data: data[:16] + b"[" + data[17:], "its header is damaged"),
        (lambda data: data[:20], "its header is damaged"),
        (lambda data: data[:12] + b"\0\xc0\0\0" + b"[" * 49_152, "its header is damaged"),
        (lambda data: data[:-1], "so it is not complete"),
        (lambda data: data[: len(data) // 2], "so it is not complete"),
        (lambda data: data + b"\0", "so it is not complete"),
        (lambda data: rewritten(data, tokens=10**6), "so it is not complete"),
        (lambda data: rewritten(data, tokens=-1), "numbers of tokens and documents are not possible"),
        (lambda data: rewritten(data, tokens=2.5), "numbers of tokens and documents are not possible"),
        (lambda data: rewritten(data, tokens=10**30), "numbers of tokens and documents are not possible"),
        (lambda data: rewritten(data, documents=0), "numbers of tokens and documents are not possible"),
        (lambda data: rewritten(data, documents=None), "its header is damaged"),
        (lambda data: rewritten(data, dtype="float64"), "number types are unknown"),
        (lambda data: rewritten(data, places=["uint32"]), "number types are unknown"),
        (lambda data: rewritten(data, vocab_size=10**6), "vocabulary does not fit"),
        (lambda data: rewritten(data, fingerprint=7), "the name of its tokenizer is not text"),
        (lambda data: data[:-4] + b"\x09\0\0\0", "its index is damaged"),
    ],
)
def test_a_damaged_or_foreign_file_is_refused(folder: Path, damage: Any, says: str) -> None:
    stored(folder / "whole", [[1, 2, 3, 1, 2], [4, 5]])
    path = folder / "damaged"
    path.write_bytes(damage((folder / "whole").read_bytes()))
    with pytest.raises(BadParameter) as told:
        Store(path)
    assert str(told.value).startswith(f"{str(path)!r} is not a valid datastore: ")
    assert says in str(told.value)
    assert str(told.value).endswith("build it again with `leapahead datastore build`")


def test_the_tokenizer_of_an_openvino_folder_is_trusted_as_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("openvino_model.xml", "tokenizer_config.json"):
        (model / name).write_text("{}")
    (tmp_path / "text.txt").write_text("a text")
    trusted = []

    def load(name: str, trust_remote_code: bool) -> Any:
        trusted.append(trust_remote_code)
        raise BadParameter("it was asked for")

    monkeypatch.setattr(loading, "load_tokenizer", load)
    arguments = ["datastore", "build", str(tmp_path / "text.txt"), "-m", str(model), "-o", str(tmp_path / "store")]
    for flags in ([], ["--trust-remote-code"]):
        assert "it was asked for" in CliRunner().invoke(main, [*arguments, *flags]).output
    assert trusted == [False, True]


def test_a_missing_file_is_named(folder: Path) -> None:
    with pytest.raises(BadParameter, match=r"the datastore '.*none' cannot be read: No such file"):
        LLM(ToyTarget(), drafter="datastore", file=str(folder / "none"))
    with pytest.raises(BadParameter, match="cannot be read: Is a directory"):
        Store(folder)
    os.mkfifo(folder / "pipe")  # whose reader would wait for ever
    with pytest.raises(BadParameter, match="pipe' is not a datastore, since it is a device or a pipe; name a file"):
        Store(folder / "pipe")


def test_a_file_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    stored(tmp_path / "own", [[1, 2, 3]])
    assert Store("~/own").path == str(tmp_path / "own")
    assert leapahead("datastore", "show", "~/own").exit_code == 0


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.integers(1, 40))
def test_damaged_numbers_cost_drafts_only(folder: Path, seed: int, changed: int) -> None:
    """Not every number of a large file is checked when it is opened, so none may raise an error later."""
    rng = random.Random(seed)
    store = stored(folder / "good", [[rng.randrange(4) for _ in range(60)]])
    data = bytearray((folder / "good").read_bytes())
    (text, n, _), (order, m, _), _ = store.header.layout(len(store.header.packed()))[0]
    for _ in range(changed):
        data[rng.choice([text + rng.randrange(2 * n), order + rng.randrange(4 * m)])] = rng.randrange(256)
    (folder / "bad").write_bytes(data)
    bad = Store(folder / "bad")
    place = bad.longest([rng.randrange(4) for _ in range(20)])
    while place is not None and place.length < 30:
        after, _ = bad.after(place)
        assert all(token < SMALL for token in after)
        place = bad.narrowed(place, rng.randrange(4))


# ---------------------------------------------------------------------------------------------------- fingerprint


class Changed:
    """A tokenizer with one thing changed."""

    def __init__(self, tokenizer: Any, **changes: Any) -> None:
        self._tokenizer, self._changes = tokenizer, changes
        self.eos_token_id = tokenizer.eos_token_id

    def __len__(self) -> int:
        return len(self._tokenizer) + self._changes.get("padding", 0)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        found = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        swap = self._changes.get("swapped", {})
        return [swap.get(token, token) for token in found]

    def decode(self, token_ids: Any, **options: Any) -> str:
        known = [token for token in token_ids if token < len(self._tokenizer)]
        return self._tokenizer.decode(known, **options) + self._changes.get("more", "")


def test_the_fingerprint_of_a_tokenizer(tokenizer: Any) -> None:
    mine = fingerprint(tokenizer)
    one, other = tokenizer.encode("ab", add_special_tokens=False)[0], tokenizer.encode("x", add_special_tokens=False)[0]
    assert fingerprint(Changed(tokenizer)) == mine
    assert fingerprint(Changed(tokenizer, padding=40)) == mine  # as a model's vocabulary may be
    assert fingerprint(Changed(tokenizer, swapped={one: other, other: one})) != mine
    assert fingerprint(Changed(tokenizer, more="!")) != mine


# --------------------------------------------------------------------------------------------------------- corpus


def written(folder: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def read(*paths: Path, column: str | None = None) -> tuple[list[str], list[str]]:
    corpus = Corpus(paths, column)
    return list(corpus.documents()), [path.name for path in corpus.skipped]


def test_a_corpus_is_files_folders_and_records(tmp_path: Path) -> None:
    written(
        tmp_path,
        {
            "in/b.txt": "bee",
            "in/a/a.py": "\ufeffay",
            "in/.git/config": "hidden",
            "in/image.png": b"\x89PNG\0\0",
            "in/latin.txt": b"caf\xe9",
            "in/odd.jsonl": '{"text": "first"}\nnot JSON\n',
            "in/r.jsonl": '{"output": "o", "content": "c"}\n\n{"text": "t", "content": "d"}\n',
            "in/rows.jsonl": "[1, 2]\n",
            "in/s.NDJSON": '{"text": "n"}\n',
            "in/torn.JSONL": '{"text": "\\ud83d only half"}\n',
            "more.txt": "more",
        },
    )
    assert read(tmp_path / "in", tmp_path / "more.txt") == (
        ["ay", "bee", "c", "t", "n", "more"],
        ["image.png", "latin.txt", "odd.jsonl", "rows.jsonl", "torn.JSONL"],
    )
    assert read(tmp_path / "in" / ".git" / "config")[0] == ["hidden"]
    assert read(tmp_path / "in" / "b.txt", tmp_path / "in" / "b.txt")[0] == ["bee"]
    assert read(tmp_path / "in" / "r.jsonl", column="content")[0] == ["c", "d"]
    assert list(Corpus(str(tmp_path / "more.txt")).documents()) == ["more"]  # type: ignore[arg-type]
    with pytest.raises(BadParameter, match=r"line 2 of '.*odd.jsonl' is not JSON"):
        read(tmp_path / "in", tmp_path / "in" / "odd.jsonl")
    with pytest.raises(BadParameter, match=r"there is no file or folder '.*none'"):
        read(tmp_path / "none")


@pytest.mark.parametrize(
    ("name", "content", "column", "says"),
    [
        ("x.bin", b"\0\1\2", None, "is not UTF-8 text; a corpus is text files"),
        ("x.txt", b"caf\xe9", None, "is not UTF-8 text"),
        ("x.jsonl", '{"text": "a"}\n{"text', None, "line 2 of '.*x.jsonl' is not JSON"),
        ("x.jsonl", "[1]", None, "line 1 of .* is not a JSON object"),
        ("x.jsonl", '{"a": "b", "c": 1}', None, "has none of the fields text, content, .*, but a, c; name one"),
        ("x.jsonl", '{"text": "b"}', "body", "has no field 'body', but text; name one with --field"),
        ("x.jsonl", '{"text": ["b"]}', None, "the field 'text' in line 1 of .* is not text"),
        ("x.jsonl", '{"text": "\\ud83d"}', None, "the field 'text' in line 1 of .* holds a lone surrogate"),
        ("x.txt", "text", "body", "there is no field 'body', since no file of the corpus is one of JSON lines"),
    ],
)
def test_a_file_given_by_name_must_be_readable(
    tmp_path: Path, name: str, content: Any, column: str | None, says: str
) -> None:
    written(tmp_path, {name: content})
    with pytest.raises(BadParameter, match=says):
        read(tmp_path / name, column=column)


def test_long_documents_are_tokenised_in_pieces(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = text_of(1, 40)
    written(tmp_path, {"a.txt": text})
    monkeypatch.setattr(corpus_module, "PIECE", 100)
    asked: list[str] = []
    encode = tokenizer.encode
    spied = Changed(tokenizer)
    monkeypatch.setattr(spied, "encode", lambda text, **options: (asked.append(text), encode(text, **options))[1])
    progress: list[tuple[str, int, int]] = []
    header = build(Corpus([tmp_path / "a.txt"]), tmp_path / "out", spied, progress=lambda *now: progress.append(now))
    pieces = [piece for piece in asked if piece in text]
    assert "".join(pieces) == text
    assert 20 > len(pieces) > 10
    assert header.documents == 1
    assert {what.split()[0] for what, _, _ in progress} == {"reading", "tokenising", "sorting"}
    assert all(0 <= done <= total for what, done, total in progress if what != "tokenising a.txt (kB)")


def test_a_build_that_fails_leaves_what_was_there(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, {"a.txt": "some text", "empty.txt": "", "out": "old"})
    out = tmp_path / "out"
    with pytest.raises(BadParameter, match=r"there is no text in '.*empty.txt'"):
        build(Corpus([tmp_path / "empty.txt"]), out, tokenizer, force=True)
    with pytest.raises(BadParameter, match=r"there is no folder '.*nowhere' to write 'out' to"):
        build(Corpus([tmp_path / "a.txt"]), tmp_path / "nowhere" / "out", tokenizer)

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", full)
        with pytest.raises(BadParameter, match="cannot be written: No space left on device"):
            build(Corpus([tmp_path / "a.txt"]), out, tokenizer, force=True)
    assert out.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "empty.txt", "out"]


def test_a_file_of_the_corpus_is_not_replaced(tmp_path: Path, tokenizer: Any) -> None:
    written(tmp_path, {"a.txt": "some text"})
    (tmp_path / "link").symlink_to(tmp_path / "a.txt")
    for corpus, out in ((tmp_path / "a.txt", "link"), (tmp_path, "a.txt")):
        with pytest.raises(BadParameter, match=f"{out} cannot be replaced, because it is a file of the corpus"):
            build(Corpus([corpus]), tmp_path / out, tokenizer, force=True)
    assert (tmp_path / "a.txt").read_text() == "some text"
    (tmp_path / "link").unlink()
    for _ in range(2):  # a datastore is no text, and a folder may hold it
        assert build(Corpus([tmp_path]), tmp_path / "out", tokenizer, force=True).documents == 1


def test_folders_that_may_not_be_entered(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, {"a.txt": "some text", "closed/b.txt": "more"})
    close_folder(monkeypatch, tmp_path / "closed")
    for corpus in (tmp_path / "closed", tmp_path / "closed" / "b.txt"):
        with pytest.raises(BadParameter, match=rf"'{corpus}' cannot be read: Permission denied"):
            build(Corpus([corpus]), tmp_path / "out", tokenizer)
    with pytest.raises(BadParameter, match=r"the folder .*closed is not writable; name another file"):
        build(Corpus([tmp_path / "a.txt"]), tmp_path / "closed" / "out", tokenizer)
    with pytest.raises(BadParameter, match=r"there is no folder .*a\.txt' to write 'out' to"):
        build(Corpus([tmp_path / "a.txt"]), tmp_path / "a.txt" / "out", tokenizer)


def test_two_builds_of_one_file_at_once(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of one process, too, which have its number in common."""
    written(tmp_path, {"a.txt": "some text", "b.txt": "some other text\n" * 9})
    replace = os.replace

    def second(source: Any, place: Any) -> None:
        monkeypatch.setattr(os, "replace", replace)
        build(Corpus([tmp_path / "b.txt"]), tmp_path / "out", tokenizer)
        replace(source, place)

    monkeypatch.setattr(os, "replace", second)
    tokens = build(Corpus([tmp_path / "a.txt"]), tmp_path / "out", tokenizer).tokens
    assert Store(tmp_path / "out").header.tokens == tokens


def test_a_symbolic_link_stays_and_a_special_file_is_never_replaced(tmp_path: Path, tokenizer: Any) -> None:
    written(tmp_path, {"a.txt": "some text", "real/out": "old"})
    link, pipe, corpus = tmp_path / "link", tmp_path / "pipe", Corpus([tmp_path / "a.txt"])
    link.symlink_to(tmp_path / "real" / "out")
    build(corpus, link, tokenizer, force=True)
    assert link.is_symlink()
    assert Store(tmp_path / "real" / "out").header.documents == 1
    os.mkfifo(pipe)
    for place, what in ((pipe, "a device or another special file"), (tmp_path, "a folder")):
        with pytest.raises(BadParameter, match=f"{place} cannot be written, because it is {what}"):
            build(Corpus([tmp_path / "nowhere"]), place, tokenizer, force=True)  # before the corpus is read
    assert pipe.is_fifo()


# ------------------------------------------------------------------------------------------------------- decoding


def plain_text(target: ToyTarget, length: int, **options: Any) -> list[int]:
    return LLM(target, drafter="plain").generate([1, 2, 3], max_new_tokens=length, **options).tokens


def test_texts_equal_plain_decoding_and_take_few_steps(tmp_path: Path) -> None:
    """With a corpus that has the text, and with one that has another."""
    target = ToyTarget(vocab_size=40, order=3)
    right, wrong = (plain_text(ToyTarget(vocab_size=40, order=3, seed=seed), 200) for seed in (0, 5))
    for name, documents in (("right", [[1, 2, 3, *right]]), ("wrong", [[1, 2, 3, *wrong]])):
        stored(tmp_path / name, documents, 40)
        llm = LLM(target, drafter="datastore", file=str(tmp_path / name))
        for temperature in (0.0, 1.0):
            result = llm.generate([1, 2, 3], max_new_tokens=200, temperature=temperature, seed=1)
            assert result.tokens == plain_text(target, 200, temperature=temperature, seed=1)
            if (name, temperature) == ("right", 0.0):
                assert result.stats.acceptance_length > 8
                assert result.stats.drafter["datastore"]["tokens"] == 203


def test_an_id_outside_the_models_vocabulary_is_refused(tmp_path: Path) -> None:
    stored(tmp_path / "other", [[1, 2, 50]], 60)
    with pytest.raises(BadParameter, match=r"another tokenizer.* the token id 50, which is outside .* of 12"):
        LLM(ToyTarget(), drafter="datastore", file=str(tmp_path / "other"))
    with pytest.raises(BadParameter, match=r"'datastore' needs file=.* `leapahead datastore build` writes"):
        LLM(ToyTarget(), drafter="datastore")


# --------------------------------------------------------------------------------------------------- command line


@pytest.fixture(scope="module")
def bundled() -> LLM:
    return LLM(drafter="plain")


def leapahead(*args: Any) -> Result:
    result = CliRunner(env={"NO_COLOR": "1"}).invoke(main, [str(each) for each in args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_build_show_and_generate(tmp_path: Path, bundled: LLM, tokenizer: Any) -> None:
    prompt, options = "def add(a, b):", {"max_new_tokens": 60, "ignore_eos": True}
    plain = bundled.generate(prompt, **options)
    files = {"in/answer.txt": prompt + plain.text, "in/more.txt": text_of(5, 30), "in/x.png": b"\0"}
    written(tmp_path, {**files, "in/odd.jsonl": '{"text": "a"}\n{"te'})
    out = tmp_path / "out.data"
    built = leapahead("datastore", "build", tmp_path / "in", "-o", out)
    assert built.exit_code == 0
    assert built.stdout.startswith(f"{out}: ")
    assert built.stdout.endswith(" tokens, 2 documents\n")
    assert built.stderr.splitlines() == [
        "skipped 2 files:",
        f"  line 2 of {str(tmp_path / 'in' / 'odd.jsonl')!r} is not JSON",
        f"  {str(tmp_path / 'in' / 'x.png')!r} is not UTF-8 text; a corpus is text files, folders of them and "
        "JSON lines",
    ]
    refused = leapahead("datastore", "build", tmp_path / "in", "-o", out)
    assert (refused.exit_code, refused.stderr) == (
        2,
        f"error: {out} exists; name another file, or replace it with the option --force\n",
    )
    assert leapahead("datastore", "build", tmp_path / "in", "-o", out, "--force").exit_code == 0

    shown = json.loads(leapahead("datastore", "show", out, "--json").stdout)
    assert bundled.tokenizer is not None
    assert (shown["documents"], shown["model"], shown["dtype"]) == (2, "bundled", "uint16")
    assert (shown["fingerprint"], shown["bytes"]) == (fingerprint(bundled.tokenizer), out.stat().st_size)
    table = leapahead("datastore", "show", out).stdout
    for word in ("documents", f"{shown['tokens']:,}", shown["fingerprint"], "uint16", f"{shown['bytes']:,}"):
        assert word in table

    args = ("--max-new-tokens", 60, "--ignore-eos", "--json", "-d", "datastore", "-o", f"file={out}")
    found = json.loads(leapahead("generate", prompt, *args).stdout)
    assert found["tokens"] == plain.tokens
    assert found["drafter"] == "datastore"
    assert found["stats"]["acceptance_length"] > 3

    theirs = str(tmp_path / "theirs")
    build(Corpus([tmp_path / "in" / "more.txt"]), Path(theirs), tokenizer, model="tiny")
    says = rf"theirs' was built with another tokenizer \({fingerprint(tokenizer)}, of 'tiny'\) than this model's \("
    with pytest.raises(BadParameter, match=says):
        bundled.generate("The", drafter="datastore", drafter_options={"file": theirs})


def test_a_gguf_file_has_the_fingerprint_of_its_transformers_model(tmp_path: Path, bundled: LLM) -> None:
    written(tmp_path, {"a.txt": text_of(2, 5)})
    gguf = str(gguf_models.bundled("f32"))
    assert leapahead("datastore", "build", tmp_path / "a.txt", "-m", gguf, "-o", tmp_path / "out").exit_code == 0
    assert bundled.tokenizer is not None
    assert Store(tmp_path / "out").header.fingerprint == fingerprint(bundled.tokenizer)


def test_records_of_a_field(tmp_path: Path) -> None:
    written(tmp_path, {"r.jsonl": '{"body": "a b c"}\n{"body": "d e f"}\n'})
    refused = leapahead("datastore", "build", tmp_path / "r.jsonl", "-o", tmp_path / "out")
    assert refused.exit_code == 2
    assert "has none of the fields text, content, output, completion, but body; name one with --field" in refused.stderr
    built = leapahead("datastore", "build", tmp_path / "r.jsonl", "--field", "body", "-o", tmp_path / "out")
    assert built.stdout.endswith(" tokens, 2 documents\n")


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    written(tmp_path, {"a.txt": "text"})
    for model, says in ((tmp_path / "no.gguf", "there is no file"), (tmp_path / "none", "there is no folder")):
        result = leapahead("datastore", "build", tmp_path / "a.txt", "-m", model, "-o", tmp_path / "out")
        assert result.exit_code == 2
        assert says in result.stderr
