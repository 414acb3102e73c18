"""What drafters keep: files that are whole or refused in words, processes that share one, texts that stay equal."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import EntryPoint
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import click
import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from leapahead import LLM, BadParameter, Drafter, LeapaheadError
from leapahead.cli.options import all_of
from leapahead.cli.screen import Failure
from leapahead.core.tree import Budget, TokenTree
from leapahead.drafters import cache as room
from leapahead.drafters import cache_sections
from leapahead.drafters.base import Context, Proposal
from leapahead.drafters.cache import Arrays, DrafterCache, Section
from leapahead.drafters.pool import NgramPool, SharedPool
from leapahead.models.toy import ToyTarget

cli = import_module("leapahead.cli.memory")  # the package has the command under this name

VOCAB = 100
PROMPT = [1, 2, 3]


class Words(Section):
    """A fake: the last tokens seen, each once, oldest first."""

    token_arrays: ClassVar[tuple[str, ...]] = ("tokens",)

    def __init__(self, tokens: Sequence[int] = (), capacity: int = 1000) -> None:
        self.tokens, self.capacity = list(tokens), capacity

    def arrays(self) -> dict[str, Any]:
        return {"tokens": np.array(self.tokens, dtype=np.int32)}

    def merge(self, arrays: Arrays) -> None:
        if arrays["tokens"].ndim != 1 or arrays["tokens"].dtype.kind != "i":
            raise ValueError("not words")
        both = dict.fromkeys(token for token in arrays["tokens"].tolist() if token not in self.tokens)
        self.tokens = [*both, *self.tokens][-self.capacity :]

    def figures(self) -> dict[str, Any]:
        return {"words": len(self.tokens)}


def made(
    tokens: Sequence[int] = (), name: str = "words", tokenizer: str = "T", vocab_size: int = VOCAB
) -> DrafterCache:
    memory = DrafterCache()
    memory.belong(tokenizer, vocab_size)
    if tokens:
        memory.section(name, lambda: Words(tokens))
    return memory


def words(drafter_cache: DrafterCache, name: str = "words") -> list[int]:
    return memory.section(name, Words).tokens


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "memory.npz"


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a package had been installed that declares the part."""
    entries = [
        EntryPoint("words", "test_memory:Words", cache_sections.GROUP),
        EntryPoint("bad", "test_memory:made", cache_sections.GROUP),
    ]
    monkeypatch.setattr(cache_sections, "entry_points", lambda group: entries if group == cache_sections.GROUP else [])


# --------------------------------------------------------------------------------------------------------- in memory


def test_a_part_is_made_once_and_shared() -> None:
    memory = DrafterCache()
    assert memory.section("words", Words) is memory.section("words", Words)
    assert memory.section("others", Words) is not memory.section("words", Words)


def test_threads_get_the_same_part() -> None:
    memory, found = DrafterCache(), set[int]()
    threads = [threading.Thread(target=lambda: found.add(id(memory.section("words", Words)))) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 1


def test_a_memory_belongs_to_one_vocabulary() -> None:
    memory = DrafterCache()
    memory.belong(lambda: pytest.fail("nobody needs to know yet"), VOCAB)
    memory = made([1])
    memory.belong("T", VOCAB)
    memory.belong(lambda: "T", VOCAB)
    with pytest.raises(BadParameter, match="belongs to the tokenizer 'T' and the model has 'U'"):
        memory.belong("U", VOCAB)
    with pytest.raises(BadParameter, match="belongs to a vocabulary of 100 and the model has one of 101"):
        memory.belong("T", 101)


# --------------------------------------------------------------------------------------------------------- the pool


ngrams = st.lists(st.tuples(st.integers(0, 4), st.tuples(st.integers(0, 4), st.integers(0, 4))), max_size=40)


def pool_of(entered: list[Any], guesses: int = 3, capacity: int = 10) -> SharedPool:
    pool = SharedPool(3, guesses, capacity)
    pool.put(entered)
    return pool


def written(part: Section) -> dict[str, Any]:
    return {name: array.tolist() for name, array in part.arrays().items()}


@given(ngrams)
def test_a_pool_comes_back_as_it_was(entered: list[Any]) -> None:
    pool, again = pool_of(entered), pool_of([])
    again.merge(pool.arrays())
    assert written(again) == written(pool)
    assert [again.get(key) for key in range(5)] == [pool.get(key) for key in range(5)]


@given(ngrams, ngrams)
@pytest.mark.parametrize(("guesses", "capacity"), [(3, 10), (3, 1000), (1000, 10), (1000, 1000)])
def test_a_merged_pool_is_that_of_both_texts(guesses: int, capacity: int, theirs: list[Any], ours: list[Any]) -> None:
    """Theirs first, so that ours are the most recent, and the last to go."""
    before, merged = pool_of(ours, guesses, capacity), pool_of(ours, guesses, capacity)
    merged.merge(pool_of(theirs, guesses, capacity).arrays())
    ordered = NgramPool(3, guesses, capacity)
    for key, tail in [*pool_of(theirs, guesses, capacity)._pool.ngrams(), *before._pool.ngrams()]:
        ordered.add(key, tail)
    assert len(merged) <= capacity
    for key in range(5):
        found, mine = merged.get(key), before.get(key)
        assert found == ordered.get(key)
        assert len(found) <= guesses
        assert found[: len(mine)] == mine[: len(found)]


@given(ngrams, ngrams)
def test_merging_again_changes_nothing(theirs: list[Any], ours: list[Any]) -> None:
    merged = pool_of(ours)
    merged.merge(pool_of(theirs).arrays())
    once = written(merged)
    merged.merge(merged.arrays())
    assert written(merged) == once


def test_longer_ngrams_are_cut_and_shorter_ones_refused() -> None:
    pool = SharedPool(3, 8, 100)
    pool.merge(pool_arrays([1, 1], [[2, 3, 4], [2, 3, 5]]))
    pool.put([(7, (8, 9, 10))])
    assert (pool.get(1), pool.get(7)) == ([(2, 3)], [(8, 9)])
    with pytest.raises(ValueError, match="n-grams of 2 tokens do not fit a pool of 3"):
        pool.merge(pool_arrays([1], [[2]]))
    with pytest.raises(ValueError, match="n-grams of 2 tokens do not fit a pool of 3"):
        pool.put([(1, (2,))])


def pool_arrays(keys: Any, tails: Any, dtype: Any = np.int32) -> dict[str, Any]:
    return {"keys": np.array(keys, dtype=dtype), "tails": np.array(tails, dtype=dtype)}


@pytest.mark.parametrize(
    "arrays",
    [
        {},
        {"keys": np.array([1])},
        pool_arrays([1], [[2, 3]], np.float32),
        pool_arrays([1, 2], [[2, 3]]),
        pool_arrays([[1]], [[2, 3]]),
        pool_arrays([1], [2, 3]),
        pool_arrays(1, [[2, 3]]),
    ],
)
def test_what_is_no_pool_is_refused_and_changes_nothing(arrays: Any) -> None:
    pool = pool_of([(1, (2, 3))])
    with pytest.raises(ValueError, match="pool"):
        pool.merge(arrays)
    assert written(pool) == {"keys": [1], "tails": [[2, 3]]}


def test_a_pool_serves_threads() -> None:
    pool = SharedPool(3, 4, 200)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            rng = np.random.default_rng(seed)
            for _ in range(200):
                pool.put([(int(a), (int(b), int(c))) for a, b, c in rng.integers(0, 50, (5, 3))])
                pool.get(int(rng.integers(50)))
                pool.merge(pool.arrays())
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert 0 < len(pool) <= 200


# ------------------------------------------------------------------------------------------------------ real parts


def taught(name: str) -> Section:
    """A built-in part with something in it: from a text, where a drafter keeps it."""
    if name == "lookahead":
        pool = SharedPool()
        pool.put([(1, (2, 3, 4, 5)), (1, (9, 8, 7, 6)), (5, (6, 7, 8, 9))])
        return pool
    model = LLM(ToyTarget(), drafter="auto")
    model.generate(PROMPT, max_new_tokens=40)
    assert model.memory is not None
    return model.memory.sections[name]


@pytest.mark.parametrize("name", cache_sections.BUILT_IN)
def test_a_built_in_part_comes_back_from_a_file(name: str, file: Path) -> None:
    part, memory = taught(name), made()
    memory.sections[name] = part
    memory.save(file)
    found = cache_sections.load(file)
    assert type(found.sections[name]) is type(part) is type(cache_sections.make(name))
    assert found.unknown == {}
    assert written(found.sections[name]) == written(part)
    assert sum(array.size for array in part.arrays().values()) > 0


@pytest.mark.parametrize("name", cache_sections.BUILT_IN)
def test_a_built_in_part_counts_once_what_both_have(name: str) -> None:
    part = taught(name)
    before = written(part)
    part.merge(part.arrays())
    assert written(part) == before


@pytest.mark.parametrize("name", cache_sections.BUILT_IN)
@pytest.mark.parametrize("token", [-1, VOCAB])
def test_a_token_outside_the_vocabulary_is_refused(name: str, token: int, file: Path) -> None:
    part = taught(name)
    if not part.token_arrays:
        pytest.xfail(f"{type(part).__name__} does not name its token_arrays yet")
    for key in part.token_arrays:
        arrays = {n: np.array(a) for n, a in part.arrays().items()}
        arrays[key].flat[0] = token
        room._write(file, "T", VOCAB, {name: (part.layout, arrays)})
        with pytest.raises(BadParameter, match=f"part '{name}' .*{key} has a token outside the vocabulary of {VOCAB}"):
            cache_sections.load(file)


@pytest.mark.parametrize("name", cache_sections.BUILT_IN)
def test_a_built_in_part_refuses_what_it_did_not_write(name: str) -> None:
    """In the words of the contract, and nothing has changed then."""
    part = taught(name)
    before, arrays = written(part), part.arrays()
    wrong: list[dict[str, Any]] = [{}, {key: array[:, None] for key, array in arrays.items()}]
    for key, array in arrays.items():
        wrong += [{k: a for k, a in arrays.items() if k != key}, {**arrays, key: array[:-1]}]
        wrong += [{**arrays, key: array.astype(np.float16 if array.dtype.kind == "i" else np.int32)}]
    for each in wrong:
        with pytest.raises(ValueError, match=r"."):
            part.merge(each)
        assert written(part) == before


# --------------------------------------------------------------------------------------------------------- the file


def test_a_memory_comes_back_from_its_file(file: Path) -> None:
    memory = made([3, 1, 2])
    memory.section("empty", Words)
    assert memory.save(file) == file
    found = DrafterCache.load(file)
    assert (found.tokenizer, found.vocab_size, found.path) == ("T", VOCAB, file)
    assert words(found) == [3, 1, 2]
    assert words(found, "empty") == []
    assert os.listdir(file.parent) == [file.name]


def test_the_file_can_be_read_with_numpy_alone_and_by_its_owner_only(file: Path) -> None:
    made([3, 1, 2]).save(file)
    with np.load(file, allow_pickle=False) as found:
        assert found["words/tokens"].tolist() == [3, 1, 2]
        header = json.loads(found["header"].tobytes())
    assert header["magic"] == "leapahead memory"
    assert header["tokenizer"] == "T"
    assert header["parts"] == {"words": {"layout": 1, "arrays": ["tokens"]}}
    assert os.name != "posix" or file.stat().st_mode & 0o777 == 0o600


def test_a_file_keeps_its_rights_and_a_link_its_goal(file: Path) -> None:
    made([1]).save(file)
    file.chmod(0o640)
    link = file.with_name("link.npz")
    link.symlink_to(file)
    memory = DrafterCache.load(link)
    words(memory).append(2)
    memory.save()
    assert link.is_symlink()
    assert file.stat().st_mode & 0o777 == 0o640
    assert words(DrafterCache.load(file)) == [1, 2]


def test_arrays_of_every_shape_and_kind_of_number_come_back(file: Path) -> None:
    arrays = {
        "none": np.empty((0, 3), np.int32),
        "one": np.array(7.5),
        "columns": np.asfortranarray(np.arange(6, dtype=np.int64).reshape(2, 3)),
        "big": np.arange(3, dtype=">u2"),
        "flags": np.array([True, False]),
    }
    room._write(file, "T", VOCAB, {"theirs": (1, arrays)})
    found = DrafterCache.load(file).unknown["theirs"].arrays
    for name, array in arrays.items():
        assert found[name].shape == array.shape
        assert found[name].tolist() == array.tolist()


def test_a_part_that_nobody_knows_goes_through_load_and_save(file: Path, tmp_path: Path) -> None:
    arrays = {"values": np.arange(5, dtype=np.float32)}
    room._write(file, "T", VOCAB, {"theirs": (7, arrays), "words": (1, {"tokens": np.array([4])})})
    memory = cache_sections.load(file)
    assert list(memory.unknown) == ["theirs", "words"]
    words(memory).append(5)
    other = memory.save(tmp_path / "other.npz")
    found = DrafterCache.load(other).unknown
    assert (found["theirs"].layout, found["theirs"].arrays["values"].tolist()) == (7, [0, 1, 2, 3, 4])
    assert words(DrafterCache.load(other)) == [4, 5]


def test_of_two_unknown_parts_the_newer_save_stands_and_other_files_are_refused(file: Path, tmp_path: Path) -> None:
    room._write(file, "T", VOCAB, {"theirs": (1, {"values": np.array([1])})})
    memory = DrafterCache.load(file)
    room._write(file, "T", VOCAB, {"theirs": (1, {"values": np.array([2])})})
    memory.save()
    assert DrafterCache.load(file).unknown["theirs"].arrays["values"].tolist() == [2]
    other = tmp_path / "other.npz"
    room._write(other, "T", VOCAB, {"theirs": (1, {"values": np.array([3])})})
    with pytest.raises(BadParameter, match="both have a part 'theirs', which nothing"):
        memory.take_over(other)


@pytest.mark.usefixtures("known")
def test_a_third_partys_part_is_ready_where_it_is_installed(file: Path) -> None:
    made([4]).save(file)
    memory = cache_sections.load(file)
    assert isinstance(memory.sections["words"], Words)
    assert memory.unknown == {}
    made([4], name="bad").save(file, replace=True)
    with pytest.raises(BadParameter, match=r"entry point 'bad' gives .* not a subclass of Section"):
        cache_sections.load(file)


def refused(file: Path, data: bytes) -> str:
    file.write_bytes(data)
    with pytest.raises(BadParameter) as refusal:
        words(DrafterCache.load(file))
    assert file.name in str(refusal.value)
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


def test_a_file_cut_anywhere_is_refused(file: Path) -> None:
    made([3, 1, 2]).save(file)
    data = file.read_bytes()
    for length in range(len(data)):
        assert "is no memory of leapahead, or a damaged one" in refused(file, data[:length])


def test_a_file_with_any_byte_flipped_is_refused_or_unharmed(file: Path) -> None:
    """Never a traceback from inside, never other words; some bytes of a zip mean nothing (times, rights)."""
    made([3, 1, 2]).save(file)
    data = file.read_bytes()
    unharmed = 0
    for index in range(len(data)):
        file.write_bytes(data[:index] + bytes([data[index] ^ 0xFF]) + data[index + 1 :])
        try:
            found = DrafterCache.load(file)
            assert (words(found), found.tokenizer, found.vocab_size) == ([3, 1, 2], "T", VOCAB)
            unharmed += 1
        except BadParameter:
            pass
    assert 0 < unharmed < 0.2 * len(data)


def npz(**arrays: Any) -> bytes:
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()


def header(**changed: Any) -> Any:
    plain = {"magic": room.MAGIC, "format": 1, "id": "a", "tokenizer": "T", "vocab_size": VOCAB, "parts": {}}
    return np.frombuffer(json.dumps({**plain, **changed}).encode(), dtype=np.uint8)


PART = {"words": {"layout": 1, "arrays": ["tokens"]}}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no zip at all",
        npz(),
        npz(weights=np.zeros(3)),
        npz(header=np.zeros(0, np.uint8)),
        npz(header=np.frombuffer(b"[1, 2]", np.uint8)),
        npz(header=np.frombuffer(b"{" * 100_000, np.uint8)),
        npz(header=header(magic="somebody else's")),
        npz(header=header(vocab_size="many")),
        npz(header=header(vocab_size=True)),
        npz(header=header(vocab_size=0)),
        npz(header=header(tokenizer=3)),
        npz(header=header(parts=[])),
        npz(header=header(parts=PART)),
        npz(header=header(parts={"words": {"layout": "1", "arrays": []}})),
        npz(header=header(parts={"words": []})),
        npz(header=header(parts=PART), **{"words/tokens": np.array(["a"])}),
        npz(header=header(parts=PART), **{"words/tokens": np.array([("a", 1)], dtype=[("x", "U1"), ("y", "i4")])}),
    ],
)
def test_a_foreign_file_is_refused(data: bytes, file: Path) -> None:
    assert "is no memory of leapahead, or a damaged one" in refused(file, data)


@pytest.mark.parametrize("tokens", [np.array([[1]]), np.array([1.5]), np.array([VOCAB]), np.array([-1])])
def test_arrays_that_the_part_does_not_take_are_refused(tokens: Any, file: Path) -> None:
    said = refused(file, npz(header=header(parts=PART), **{"words/tokens": tokens}))
    assert "is damaged in its part 'words'" in said
    assert "delete this one to begin anew" in said


def test_a_missing_array_is_refused(file: Path) -> None:
    data = npz(header=header(parts={"words": {"layout": 1, "arrays": []}}))
    assert "is damaged in its part 'words' ('tokens')" in refused(file, data)


def test_a_pickle_is_never_run(file: Path) -> None:
    """An array of objects is one: loading this one would make a file."""
    trace = file.with_name("trace")

    class Evil:
        def __reduce__(self) -> Any:
            return (open, (str(trace), "w"))

    data = npz(header=header(parts=PART), **{"words/tokens": np.array([Evil()], dtype=object)})
    assert "is no memory of leapahead" in refused(file, data)
    assert not trace.exists()


def test_an_array_that_says_that_it_is_huge_is_refused(file: Path) -> None:
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"shape": (10**12,), "fortran_order": False, "descr": "<i8"})
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("header.npy", npy(header(parts=PART)))
        archive.writestr("words/tokens.npy", stream.getvalue())
    assert "not as long as it says" in refused(file, file.read_bytes())


def npy(array: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=False)
    return stream.getvalue()


def test_a_file_that_unpacks_to_too_much_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "LARGEST", 100_000)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("header.npy", npy(header(parts=PART)))
        archive.writestr("words/tokens.npy", npy(np.zeros(100_000, np.int32)))
    assert file.stat().st_size < 5_000
    assert "has 0 MB and a memory at most 0" in refused(file, file.read_bytes())
    assert "a memory at most" in refused(file, b"x" * 100_001)
    with pytest.raises(BadParameter, match="a memory at most"):
        made(range(1, 99_000), vocab_size=99_000).save(file, replace=True)


def test_a_newer_format_is_told_from_a_damaged_one(file: Path) -> None:
    said = refused(file, npz(header=header(format=2)))
    assert "is written in format 2 and this leapahead reads format 1; update leapahead" in said
    data = npz(header=header(parts={"words": {"layout": 2, "arrays": ["tokens"]}}), **{"words/tokens": np.array([1])})
    assert "has the part 'words' in layout 2, and what is installed here reads layout 1" in refused(file, data)


def test_a_save_never_replaces_what_is_no_memory_or_anothers(file: Path) -> None:
    file.write_text("my diary")
    with pytest.raises(BadParameter, match="is no memory of leapahead"):
        made([1]).save(file)
    assert file.read_text() == "my diary"
    made([5], tokenizer="U").save(file, replace=True)
    with pytest.raises(BadParameter, match=r"belongs to 'U' and cannot be merged with the tokenizer 'T'"):
        made([1]).save(file)
    assert words(DrafterCache.load(file)) == [5]


def test_nowhere_to_save(tmp_path: Path) -> None:
    with pytest.raises(BadParameter, match="has no file; say where"):
        made([1]).save()
    with pytest.raises(BadParameter, match="belongs to no vocabulary yet"):
        DrafterCache().save(tmp_path / "m.npz")
    with pytest.raises(BadParameter, match=r"cannot be written to .*folder that exists"):
        made([1]).save(tmp_path / "none" / "m.npz")
    with pytest.raises(BadParameter, match="cannot be read"):
        made([1]).save(tmp_path)
    with pytest.raises(BadParameter, match="there is no memory"):
        DrafterCache.load(tmp_path / "none.npz")
    assert os.listdir(tmp_path) == []


def test_a_crash_leaves_the_file_as_it_was(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = made([1])
    memory.save(file)
    before = file.read_bytes()

    def crash(*_: Any) -> None:
        raise KeyboardInterrupt

    for token, function in enumerate(("fsync", "replace"), 2):
        with monkeypatch.context() as patched:
            patched.setattr(os, function, crash)
            words(memory).append(token)
            with pytest.raises(KeyboardInterrupt):
                memory.save()
    assert file.read_bytes() == before
    assert os.listdir(file.parent) == [file.name]
    memory.save()
    assert words(DrafterCache.load(file)) == [1, 2, 3]


# --------------------------------------------------------------------------------------------------- two that share


def test_a_save_merges_with_what_was_saved_meanwhile(file: Path) -> None:
    made([1]).save(file)
    one, two = DrafterCache.load(file), DrafterCache.load(file)
    words(one).append(2)
    words(two).append(3)
    one.save()
    two.save()
    assert words(DrafterCache.load(file)) == words(two) == [2, 1, 3]
    one.save()  # and reads what two had added
    assert set(words(one)) == {1, 2, 3}


def test_a_file_is_found_again_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = llm(drafter_cache="memory.npz")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert model.save_drafter_cache() == tmp_path / "memory.npz"
    assert os.listdir() == []


def test_what_is_on_the_disk_already_is_not_read_again(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = made([1])
    memory.save(file)
    monkeypatch.setattr(Words, "merge", lambda self, arrays: pytest.fail("merged with itself"))
    memory.save()
    memory.save()


def test_a_part_that_another_saved_is_there_when_it_is_asked_for(file: Path) -> None:
    one, two = made([1]), made([2], name="others")
    one.save(file)
    two.save(file)
    one.save(file)
    assert words(one, "others") == [2]
    assert words(two, "words") == [1]


WORKER = """
import sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_memory import Words
from leapahead.drafters.cache import DrafterCache
from leapahead import memory as room
if {without_fcntl}:
    room.fcntl = None
first, file, go = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
memory = DrafterCache()
memory.belong("T", 1000)
own = memory.section("words", Words)
print("ready", flush=True)
while not go.exists():
    time.sleep(0.001)
for n in range(first, first + 30):
    own.tokens.append(n)
    memory.save(file)
print("done", flush=True)
"""


@pytest.mark.parametrize("without_fcntl", [False, True])
def test_two_processes_that_save_at_the_same_time_lose_nothing(file: Path, without_fcntl: bool) -> None:
    code = WORKER.format(tests=str(Path(__file__).parent), without_fcntl=without_fcntl)
    go = file.with_name("go")
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(first), str(file), str(go)], stdout=subprocess.PIPE, text=True
        )
        for first in (0, 100)
    ]
    try:
        for worker in workers:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "ready\n"
        go.touch()
        assert [worker.communicate(timeout=60)[0] for worker in workers] == ["done\n", "done\n"]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    found = words(DrafterCache.load(file))
    assert set(found) == {*range(30), *range(100, 130)}
    assert [n for n in found if n < 100] == list(range(30))  # each its own order
    go.unlink()
    assert os.listdir(file.parent) == [file.name]


def test_two_processes_that_save_in_turn(file: Path) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); from test_memory import *\n"
        "memory = DrafterCache.load(sys.argv[1]) if Path(sys.argv[1]).exists() else made()\n"
        "words(memory).append(int(sys.argv[2])); memory.save(sys.argv[1])"
    )
    for n in range(3):
        done = subprocess.run(
            [sys.executable, "-c", code, str(file), str(n)], capture_output=True, text=True, check=False
        )
        assert (done.stderr, done.returncode) == ("", 0)
    assert words(DrafterCache.load(file)) == [0, 1, 2]


@pytest.mark.parametrize("without_fcntl", [False, True])
def test_one_that_does_not_let_go_is_waited_for_and_told(
    file: Path, without_fcntl: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if without_fcntl:
        monkeypatch.setattr(room, "fcntl", None)
    memory = made([1])
    with room._locked(file):
        monkeypatch.setattr(room, "PATIENCE", 0.1)
        with pytest.raises(BadParameter, match=r"another process has been saving to .* delete .*\.memory\.npz\.lock"):
            memory.save(file)
        monkeypatch.setattr(room, "PATIENCE", 10.0)
        saving = threading.Thread(target=lambda: memory.save(file))
        saving.start()
        saving.join(0.2)
        assert saving.is_alive()
    saving.join(10)
    assert words(DrafterCache.load(file)) == [1]


@pytest.mark.skipif(room.fcntl is None, reason="only where the system frees the locks of the dead")
def test_the_lock_of_a_process_that_died_is_free(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.with_name(f".{file.name}.lock").touch()
    monkeypatch.setattr(room, "PATIENCE", 0.1)
    made([1]).save(file)
    assert os.listdir(file.parent) == [file.name]


@pytest.mark.skipif(room.fcntl is None, reason="of locks that the system keeps")
def test_a_lock_that_was_deleted_while_one_waited_for_it_is_none(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its holder is through, and the next one has made another: two would write at once."""
    lock, real = file.with_name("lock"), room.fcntl

    class Slow:
        LOCK_EX, LOCK_NB = real.LOCK_EX, real.LOCK_NB
        remade = True

        def flock(self, handle: int, flags: int) -> None:
            lock.unlink()
            if self.remade:
                lock.touch()
            real.flock(handle, flags)

    slow = Slow()
    monkeypatch.setattr(room, "fcntl", slow)
    assert room._try_lock(lock) is None
    slow.remade = False
    assert room._try_lock(lock) is None
    monkeypatch.setattr(room, "fcntl", real)
    handle = room._try_lock(lock)
    assert handle is not None
    assert room._try_lock(lock) is None
    os.close(handle)


# ------------------------------------------------------------------------------------------------------------- LLM


class Remembering(Drafter):
    """Drafts what any earlier text had after the last token: a fake that learns at the end of a text."""

    name: ClassVar[str] = "remembering"

    def begin(self, context: Context) -> None:
        self.after: dict[int, int] = {}
        if context.drafter_cache is not None:
            tokens = context.drafter_cache.section("words-in-order", lambda: InOrder()).tokens
            self.after = dict(pairwise(tokens))

    def propose(self, context: Context, budget: Budget) -> Proposal:
        token = self.after.get(context.root)
        if token is None:
            return Proposal(TokenTree.root(context.root))
        return Proposal(TokenTree([context.root, token], [-1, 0]))

    def finish(self, context: Context) -> None:
        if context.drafter_cache is not None:
            context.drafter_cache.section("words-in-order", lambda: InOrder()).tokens[:] = context.tokens


class InOrder(Words):
    def merge(self, arrays: Arrays) -> None:
        self.tokens[:0] = arrays["tokens"].tolist()


def llm(**options: Any) -> LLM:
    return LLM(ToyTarget(), drafter=Remembering, **options)


def length(model: LLM) -> float:
    return model.generate(PROMPT, max_new_tokens=40).stats.acceptance_length


def test_one_text_teaches_the_next_and_only_then() -> None:
    model = llm()
    plain = model.generate(PROMPT, max_new_tokens=40)
    again = model.generate(PROMPT, max_new_tokens=40)
    assert again.tokens == plain.tokens
    assert plain.stats.acceptance_length == 1.0 < again.stats.acceptance_length
    with model.without_drafter_cache():
        assert model.memory is None
        assert length(model) == 1.0
    assert length(model) == again.stats.acceptance_length
    assert length(llm()) == 1.0


def test_without_a_memory_nothing_is_kept() -> None:
    model = llm(drafter_cache=False)
    assert model.memory is None
    assert [length(model), length(model)] == [1.0, 1.0]
    with pytest.raises(BadParameter, match="drafter_cache=False keeps nothing"):
        model.save_drafter_cache("somewhere")


def test_a_memory_goes_from_one_llm_to_another_through_a_file(file: Path) -> None:
    first = llm(drafter_cache=file)  # not there yet
    plain = first.generate(PROMPT, max_new_tokens=40)
    assert first.save_drafter_cache() == file
    second = llm(drafter_cache=str(file))
    drafted = second.generate(PROMPT, max_new_tokens=40)
    assert drafted.tokens == plain.tokens
    assert drafted.stats.acceptance_length > plain.stats.acceptance_length == 1.0
    assert DrafterCache.load(file).tokenizer == f"vocabulary of {ToyTarget().vocab_size}"


def test_an_llms_own_memory_can_be_saved_where_one_says(file: Path) -> None:
    model = llm()
    length(model)
    with pytest.raises(BadParameter, match="has no file; say where to save it"):
        model.save_drafter_cache()
    assert model.save_drafter_cache(file) == file
    assert length(llm(drafter_cache=file)) > 1.0


def test_llms_share_a_memory_of_their_vocabulary_only() -> None:
    memory = DrafterCache()
    first, second = llm(drafter_cache=memory), llm(drafter_cache=memory)
    length(first)
    assert length(second) > 1.0
    with pytest.raises(BadParameter, match="belongs to a vocabulary of 12 and the model has one of 13"):
        LLM(ToyTarget(vocab_size=13), drafter_cache=memory)


@pytest.mark.parametrize("wrong", [None, 3, "", b"file"])
def test_what_is_no_memory_is_told(wrong: Any) -> None:
    with pytest.raises(
        BadParameter, match=r"drafter_cache=.* is not possible: it must be True, False, a file, or a DrafterCache"
    ):
        llm(drafter_cache=wrong)


def test_a_file_is_looked_at_before_the_model_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "diary.txt").write_text("dear diary")
    for wrong, says in [(tmp_path / "diary.txt", "is no memory"), (tmp_path / "none" / "m", "does not exist")]:
        with pytest.raises(BadParameter, match=says):
            LLM("no/such-model", drafter_cache=wrong)


@pytest.fixture(scope="module")
def bundled() -> LLM:
    return LLM(dtype="float32", drafter_cache=False)


def over(bundled: LLM, **options: Any) -> LLM:
    """Another LLM of the bundled model, without loading it again."""
    return LLM(bundled.target, tokenizer=bundled.tokenizer, **options)


def test_another_tokenizers_file_is_refused_by_name(bundled: LLM, file: Path, tokenizer: Any) -> None:
    over(bundled, drafter_cache=file).save_drafter_cache()
    saved = DrafterCache.load(file).tokenizer
    with pytest.raises(BadParameter) as refusal:
        LLM(bundled.target, tokenizer=tokenizer, drafter_cache=file)
    assert f"the memory {file} belongs to the tokenizer '{saved}' and the model has '" in str(refusal.value)
    with pytest.raises(BadParameter, match=f"belongs to the tokenizer '{saved}' and the model has 'vocabulary of "):
        LLM(bundled.target.model, drafter_cache=file)
    over(bundled, drafter_cache=file)


CODE = "def fibonacci(n):\n    if n < 2:\n        return n\n    return "


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_saved_memory_drafts_a_repeated_prompt_better(bundled: LLM, file: Path, temperature: float) -> None:
    options: dict[str, Any] = {"max_new_tokens": 60, "temperature": temperature, "seed": 1}
    drafting: dict[str, Any] = {"drafter": "suffix"}
    plain = over(bundled, drafter="plain", drafter_cache=False).generate(CODE, **options)
    first = over(bundled, drafter_cache=file, **drafting)
    fresh = first.generate(CODE, **options)
    first.save_drafter_cache()
    drafted = over(bundled, drafter_cache=file, **drafting).generate(CODE, **options)
    assert plain.tokens == fresh.tokens == drafted.tokens
    assert drafted.stats.acceptance_length > 1.5 * fresh.stats.acceptance_length
    kept_nothing = over(bundled, drafter_cache=False, **drafting)
    lengths = [kept_nothing.generate(CODE, **options).stats.acceptance_length for _ in range(2)]
    assert lengths == [fresh.stats.acceptance_length] * 2


# ---------------------------------------------------------------------------------------------------------- commands


def command(*arguments: object) -> Result:
    """As `leapahead memory ...`."""
    runner = CliRunner()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cli.memory, "invoke", failing(cli.memory.invoke))
        result = runner.invoke(cli.memory, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def failing(invoke: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Errors in one line, as `main` shows them."""

    def run(context: Any) -> Any:
        try:
            return invoke(context)
        except LeapaheadError as error:
            raise Failure.of(error) from None

    return run


@pytest.mark.usefixtures("known")
def test_show(file: Path) -> None:
    memory = made([1, 2, 3])
    memory.section("theirs", lambda: Words([5]))
    memory.section("lookahead", SharedPool).put([(1, (2, 3, 4, 5))])
    memory.save(file)
    shown = command("show", file)
    assert (shown.exit_code, shown.stderr) == (0, "")
    first, titles, *rows = shown.stdout.splitlines()
    assert first == f"{file}: {file.stat().st_size / 1e6:.2f} MB, tokenizer T, 100 ids"
    assert titles.split() == ["part", "MB", "holds"]
    assert [row.split()[0] for row in rows] == ["words", "lookahead", "theirs"]
    assert rows[0].endswith("0.00  words 3")
    assert "prefixes 1, continuations 1, " in rows[1]
    assert rows[2].endswith("0.00  tokens [1]; not known here")
    told = json.loads(command("show", file, "--json").stdout)
    assert (told["tokenizer"], told["vocab_size"], told["bytes"]) == ("T", 100, file.stat().st_size)
    assert told["parts"]["words"] == {
        "known": True,
        "layout": 1,
        "bytes": 12,
        "arrays": {"tokens": [3]},
        "figures": {"words": 3},
    }


def test_show_tells_what_is_wrong_in_one_line(file: Path) -> None:
    file.write_text("my diary")
    shown = command("show", file)
    assert (shown.exit_code, shown.stdout) == (2, "")
    assert shown.stderr.startswith(f"error: {file} is no memory of leapahead")
    assert shown.stderr.count("\n") == 1


@pytest.mark.usefixtures("known")
def test_merge(tmp_path: Path) -> None:
    one, two, out = (tmp_path / name for name in ("one", "two", "out"))
    made([1, 2]).save(one)
    memory = made([2, 3])
    memory.section("lookahead", SharedPool).put([(1, (2, 3, 4, 5))])
    memory.save(two)
    merged = command("merge", one, two, "-o", out)
    assert merged.exit_code == 0
    assert merged.stdout == f"{out}: {out.stat().st_size / 1e6:.2f} MB, from 2 files\n"
    found = cache_sections.load(out)
    assert words(found) == [1, 2, 3]
    assert found.section("lookahead", SharedPool).get(1) == [(2, 3, 4, 5)]
    again = command("merge", two, one, "-o", out)
    assert (again.exit_code, again.stderr) == (
        2,
        f"error: {out} exists; name another file, or give --force to replace it\n",
    )
    command("merge", two, one, "-o", out, "--force")
    assert words(DrafterCache.load(out)) == [3, 1, 2]


def test_merge_refuses_other_tokenizers_by_name(tmp_path: Path) -> None:
    one, two, out = (tmp_path / name for name in ("one", "two", "out"))
    made([1]).save(one)
    made([1], tokenizer="U").save(two)
    merged = command("merge", one, two, "-o", out)
    assert merged.exit_code == 2
    assert f"{one} belongs to 'T' and cannot be merged with the tokenizer 'U'" in merged.stderr
    assert not out.exists()


@pytest.mark.parametrize(("error", "code"), [(None, 0), (KeyboardInterrupt, 1), (click.ClickException, 1)])
def test_a_command_saves_at_the_end_whatever_happens(file: Path, error: Any, code: int) -> None:
    @click.command()
    @all_of(cli.MEMORY)
    def draft(**values: Any) -> None:
        model = cli.saved_at_the_end(llm(drafter_cache=cli.memory_argument(values)))
        assert values == {}
        length(model)
        if error is not None:
            raise error("stop")

    assert CliRunner().invoke(draft, []).exit_code == code
    assert os.listdir(file.parent) == []
    assert CliRunner().invoke(draft, ["--drafter-cache", str(file)]).exit_code == code
    assert length(llm(drafter_cache=file)) > 1.0
