"""The drafter cache: sections, files that load or are refused by name, processes and threads that share one."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import click
import numpy as np
import pytest
from click.testing import CliRunner

from leapahead import LLM, BadParameter, SequenceDrafter
from leapahead.bench.compare import compare
from leapahead.cli import main
from leapahead.core.tree import Budget, TokenTree
from leapahead.drafters import cache_file, cache_sections
from leapahead.drafters.cache import Arrays, DrafterCache, Section
from leapahead.drafters.section import BUILT_IN, make
from leapahead.drafters.sources.past_texts import PastTexts
from leapahead.models.toy import ToyTarget
from leapahead.planner.draft import Proposal, SequenceView

VOCAB = 100
PROMPT = [1, 2, 3]
SAVED_EARLIER = Path(__file__).parent / "data" / "drafter_cache_format_1.npz"  # by the version before the redesign


class Words(Section):
    """A simple section: the last tokens seen, each once, oldest first."""

    token_arrays: ClassVar[tuple[str, ...]] = ("tokens",)

    def __init__(self, tokens: Sequence[int] = (), capacity: int = 1000) -> None:
        self.tokens, self.capacity = list(tokens), capacity

    def arrays(self) -> dict[str, Any]:
        return {"tokens": np.array(self.tokens, dtype=np.int32)}

    def merge(self, arrays: Arrays) -> None:
        if arrays["tokens"].ndim != 1 or arrays["tokens"].dtype.kind != "i":
            raise ValueError("not words")
        new = dict.fromkeys(token for token in arrays["tokens"].tolist() if token not in self.tokens)
        self.tokens = [*new, *self.tokens][-self.capacity :]

    def figures(self) -> dict[str, Any]:
        return {"words": len(self.tokens)}


def made(
    tokens: Sequence[int] = (), name: str = "words", tokenizer: str = "T", vocab_size: int = VOCAB
) -> DrafterCache:
    cache = DrafterCache()
    cache.belong(tokenizer, vocab_size)
    if tokens:
        cache.section(name, lambda: Words(tokens))
    return cache


def words(cache: DrafterCache, name: str = "words") -> list[int]:
    return cache.section(name, Words).tokens


def content(section: Section) -> dict[str, Any]:
    return {name: array.tolist() for name, array in section.arrays().items()}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "cache.npz"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a package were installed that declares the section "words", and one that is none."""
    package = tmp_path / "packages" / "theirs-1.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1\n")
    (package / "entry_points.txt").write_text(
        "[leapahead.cache_sections]\nwords = test_drafter_cache:Words\nbad = test_drafter_cache:made\n"
    )
    monkeypatch.syspath_prepend(str(package.parent))


# --------------------------------------------------------------------------------------------------------- sections


def test_a_section_is_created_once_whatever_the_thread() -> None:
    cache, found = DrafterCache(), set[int]()
    threads = [threading.Thread(target=lambda: found.add(id(cache.section("words", Words)))) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {id(cache.section("words", Words))}
    assert cache.section("others", Words) is not cache.section("words", Words)


def test_a_section_must_be_one() -> None:
    cache = DrafterCache()
    with pytest.raises(BadParameter, match="section 'mine' of the drafter cache is a dict; it must be of a subclass"):
        cache.section("mine", dict)  # type: ignore[type-var]
    assert not cache.sections


def test_a_cache_belongs_to_one_vocabulary() -> None:
    cache = DrafterCache()
    cache.belong(lambda: pytest.fail("not needed yet"), VOCAB)
    cache = made([1])
    cache.belong("T", VOCAB)
    cache.belong(lambda: "T", VOCAB)
    with pytest.raises(BadParameter, match="belongs to the tokenizer 'T' and the model has the tokenizer 'U'"):
        cache.belong("U", VOCAB)
    with pytest.raises(BadParameter, match="belongs to a vocabulary of 100 and the model has a vocabulary of 101"):
        cache.belong("T", 101)


def taught(name: str) -> Section:
    """A built-in section with entries."""
    drafter = {"draft_rows": "cascade", "phrases": "ouroboros"}.get(name, "auto")
    options = {} if drafter == "auto" else {"draft": ToyTarget(order=1), "nodes": 4}
    llm = LLM(ToyTarget(), drafter=drafter, **options)  # type: ignore[arg-type]
    llm.generate(PROMPT, max_new_tokens=40)
    assert llm.drafter_cache is not None
    return llm.drafter_cache.sections[name]


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_built_in_section(name: str, file: Path) -> None:
    """It survives a file, counts once what it merges with itself, and refuses arrays that it did not write."""
    section, cache = taught(name), made()
    before, arrays = content(section), section.arrays()
    assert sum(array.size for array in arrays.values()) > 0
    cache.section(name, lambda: section)
    cache.save(file)
    found = cache_sections.load(file)
    assert type(found.sections[name]) is type(section) is type(make(name))
    assert found.unknown == {}
    assert content(found.sections[name]) == before
    section.merge(arrays)
    assert content(section) == before
    wrong: list[dict[str, Any]] = [{}, {key: array[:, None] for key, array in arrays.items()}]
    for key, array in arrays.items():
        wrong += [{k: a for k, a in arrays.items() if k != key}, {**arrays, key: array[:-1]}]
        wrong += [{**arrays, key: array.astype(np.float16 if array.dtype.kind == "i" else np.int32)}]
    for each in wrong:
        with pytest.raises(ValueError, match=r"."):
            section.merge(each)
        assert content(section) == before


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("token", [-1, VOCAB])
def test_a_token_outside_the_vocabulary_is_refused(name: str, token: int, file: Path) -> None:
    section = taught(name)
    assert section.token_arrays
    for key in section.token_arrays:
        arrays = {n: np.array(a) for n, a in section.arrays().items()}
        arrays[key].flat[0] = token
        cache_file.write(file, "T", VOCAB, {name: (section.layout, arrays)})
        with pytest.raises(BadParameter, match=f"section '{name}' .*{key} has a token outside the vocabulary of 100"):
            cache_sections.load(file)


def test_saves_and_requests_of_several_threads_share_one_cache(file: Path) -> None:
    """Sections grow while they are written to a file and merged from it."""
    cache, errors, done = DrafterCache(), list[BaseException](), threading.Event()
    llm = LLM(ToyTarget(), drafter="auto", drafter_cache=cache)
    plain = [LLM(ToyTarget(), drafter="plain").generate([n, 2, 3], max_new_tokens=16).tokens for n in range(4)]
    past = cache.section("suffix", PastTexts)

    def save() -> None:
        try:
            while not done.is_set():
                cache.save(file)
                DrafterCache.load(file)
        except BaseException as error:
            errors.append(error)

    def enter() -> None:
        try:
            rng = np.random.default_rng(0)
            while not done.is_set():
                past.add([int(token) for token in rng.integers(0, 12, 6)])
                past.merge(past.arrays())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=target) for target in (save, save, enter)]
    for thread in threads:
        thread.start()
    try:
        for n in range(12):
            assert llm.generate([n % 4, 2, 3], max_new_tokens=16).tokens == plain[n % 4]
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert errors == []
    assert set(cache_sections.load(file).sections) == {"suffix", "recycling"}


# --------------------------------------------------------------------------------------------------------- the file


def test_a_file_saved_before_the_redesign_loads_teaches_and_merges(file: Path) -> None:
    """It has the text of the toy model, two n-grams, and a section that is not installed."""
    shutil.copy(SAVED_EARLIER, file)
    llm = LLM(ToyTarget(), drafter="suffix", drafter_cache=file)
    cache = llm.drafter_cache
    assert cache is not None
    assert set(cache.sections) == {"suffix", "recycling"}
    drafted = llm.generate(PROMPT, max_new_tokens=40)
    fresh = LLM(ToyTarget(), drafter="suffix").generate(PROMPT, max_new_tokens=40)
    assert drafted.tokens == fresh.tokens
    assert drafted.stats.acceptance_length > 1.5 * fresh.stats.acceptance_length
    assert cache.section("suffix", lambda: pytest.fail("it is there")).arrays()["tokens"].tolist() == [
        *PROMPT,
        *drafted.tokens,
    ]
    llm.save_drafter_cache()
    with np.load(file, allow_pickle=False) as saved:
        header = json.loads(saved["header"].tobytes())
        assert (header["magic"], header["format"]) == ("leapahead memory", 1)  # so that older versions read it too
        assert saved["words/tokens"].tolist() == [3, 1, 2]


def test_a_cache_survives_its_file(file: Path) -> None:
    cache = made([3, 1, 2])
    cache.section("empty", Words)
    assert cache.save(file) == file
    found = DrafterCache.load(file)
    assert (found.tokenizer, found.vocab_size, found.path) == ("T", VOCAB, file)
    assert (words(found), words(found, "empty")) == ([3, 1, 2], [])
    assert os.listdir(file.parent) == [file.name]
    assert os.name != "posix" or file.stat().st_mode & 0o777 == 0o600


def test_a_save_keeps_permissions_and_symbolic_links(file: Path) -> None:
    made([1]).save(file)
    file.chmod(0o640)
    link = file.with_name("link.npz")
    link.symlink_to(file)
    cache = DrafterCache.load(link)
    words(cache).append(2)
    cache.save()
    assert link.is_symlink()
    assert file.stat().st_mode & 0o777 == 0o640
    assert words(DrafterCache.load(file)) == [1, 2]


def test_a_section_that_is_not_installed_passes_through_load_and_save(file: Path, tmp_path: Path) -> None:
    arrays = {
        "none": np.empty((0, 3), np.int32),
        "one": np.array(7.5),
        "columns": np.asfortranarray(np.arange(6, dtype=np.int64).reshape(2, 3)),
        "big": np.arange(3, dtype=">u2"),
        "flags": np.array([True, False]),
    }
    cache_file.write(file, "T", VOCAB, {"theirs": (7, arrays), "words": (1, {"tokens": np.array([4])})})
    cache = cache_sections.load(file)
    assert list(cache.unknown) == ["theirs", "words"]
    words(cache).append(5)
    found = DrafterCache.load(cache.save(tmp_path / "other.npz"))
    assert words(found) == [4, 5]
    assert found.unknown["theirs"].layout == 7
    for name, array in found.unknown["theirs"].arrays.items():
        assert (array.shape, array.tolist()) == (arrays[name].shape, arrays[name].tolist())


def test_sections_that_are_not_installed_are_not_merged(file: Path, tmp_path: Path) -> None:
    """The newer save of one file replaces the older one; two files cannot be merged."""
    cache_file.write(file, "T", VOCAB, {"theirs": (1, {"values": np.array([1])})})
    cache = DrafterCache.load(file)
    cache_file.write(file, "T", VOCAB, {"theirs": (1, {"values": np.array([2])})})
    cache.save()
    assert DrafterCache.load(file).unknown["theirs"].arrays["values"].tolist() == [2]
    other = tmp_path / "other.npz"
    cache_file.write(other, "T", VOCAB, {"theirs": (1, {"values": np.array([3])})})
    with pytest.raises(BadParameter, match="both have a section 'theirs', and no installed package can merge it"):
        cache.merge(other)


def test_files_that_nobody_has_used_yet_are_merged_and_exchanged(tmp_path: Path) -> None:
    files, texts = [tmp_path / "monday.npz", tmp_path / "tuesday.npz"], [[1, 2, 3], [4, 5, 6]]
    for file, text in zip(files, texts, strict=True):
        cache = made()
        cache.section("suffix", PastTexts).add(text)
        cache.save(file)
    merged = DrafterCache.load(files[1])
    merged.merge(files[0])
    assert merged.section("suffix", PastTexts).arrays()["tokens"].tolist() == [1, 2, 3, 4, 5, 6]
    received = made()
    received.merge_bytes(DrafterCache.load(files[0]).to_bytes())
    assert received.section("suffix", PastTexts).arrays()["tokens"].tolist() == [1, 2, 3]
    DrafterCache.load(files[0]).save(files[1])
    assert cache_sections.load(files[1]).sections["suffix"].figures()["texts"] == 2


@pytest.mark.usefixtures("installed")
def test_a_third_partys_section_is_created_where_it_is_installed(file: Path) -> None:
    made([4]).save(file)
    cache = cache_sections.load(file)
    assert isinstance(cache.sections["words"], Section)
    assert cache.unknown == {}
    made([4], name="bad").save(file, replace=True)
    with pytest.raises(BadParameter, match=r"entry point 'bad' gives .* not a subclass of Section"):
        cache_sections.load(file)


def refusal(file: Path, data: bytes) -> str:
    file.write_bytes(data)
    with pytest.raises(BadParameter) as refused:
        words(DrafterCache.load(file))
    assert file.name in str(refused.value)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_a_damaged_file_is_refused_or_gives_the_same_words(file: Path) -> None:
    """Truncated, or with one byte changed; some bytes of a zip file mean nothing (times, permissions)."""
    made([3, 1, 2]).save(file)
    data = file.read_bytes()
    for length in range(0, len(data), 7):
        assert "is not a drafter cache of leapahead, or it is damaged" in refusal(file, data[:length])
    unharmed = 0
    for index in range(0, len(data), 3):
        file.write_bytes(data[:index] + bytes([data[index] ^ 0xFF]) + data[index + 1 :])
        try:
            found = DrafterCache.load(file)
            assert (words(found), found.tokenizer, found.vocab_size) == ([3, 1, 2], "T", VOCAB)
            unharmed += 1
        except BadParameter:
            pass
    assert 0 < unharmed < 0.2 * len(data) / 3


def test_what_is_not_a_file_is_refused_and_not_read(tmp_path: Path) -> None:
    """A device may have no end, and a pipe no writer."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadParameter, match="is not a drafter cache of leapahead, since it is not a file"):
        DrafterCache.load(tmp_path / "pipe")
    with pytest.raises(BadParameter, match="pipe cannot be written, because it is a device or another special file"):
        made([1]).save(tmp_path / "pipe", replace=True)
    assert (tmp_path / "pipe").is_fifo()


def npz(**arrays: Any) -> bytes:
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()


def npy(array: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=False)
    return stream.getvalue()


def header(**changed: Any) -> Any:
    plain = {"magic": cache_file.MAGIC, "format": 1, "id": "a", "tokenizer": "T", "vocab_size": VOCAB, "parts": {}}
    return np.frombuffer(json.dumps({**plain, **changed}).encode(), dtype=np.uint8)


SECTION = {"words": {"layout": 1, "arrays": ["tokens"]}}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no zip at all",
        npz(weights=np.zeros(3)),
        npz(header=np.zeros(0, np.uint8)),
        npz(header=np.frombuffer(b"[1, 2]", np.uint8)),
        npz(header=np.frombuffer(b"{" * 100_000, np.uint8)),
        npz(header=header(magic="another program's")),
        npz(header=header(vocab_size=True)),
        npz(header=header(vocab_size=0)),
        npz(header=header(tokenizer=3)),
        npz(header=header(parts=[])),
        npz(header=header(parts=SECTION)),
        npz(header=header(parts={"words": {"layout": "1", "arrays": []}})),
        npz(header=header(parts={"words": []})),
        npz(header=header(parts=SECTION), **{"words/tokens": np.array(["a"])}),
    ],
)
def test_another_file_is_refused(data: bytes, file: Path) -> None:
    assert "is not a drafter cache of leapahead, or it is damaged" in refusal(file, data)


def test_arrays_that_a_section_does_not_take_are_refused(file: Path) -> None:
    for tokens in (np.array([[1]]), np.array([1.5])):
        message = refusal(file, npz(header=header(parts=SECTION), **{"words/tokens": tokens}))
        assert "is damaged in its section 'words'" in message
        assert "delete this one to start with an empty cache" in message
    data = npz(header=header(parts={"words": {"layout": 1, "arrays": []}}))
    assert "is damaged in its section 'words' ('tokens')" in refusal(file, data)


def test_a_pickle_is_never_executed(file: Path) -> None:
    """An array of objects is a pickle; loading this one would create a file."""
    trace = file.with_name("trace")

    class Evil:
        def __reduce__(self) -> Any:
            return (open, (str(trace), "w"))

    data = npz(header=header(parts=SECTION), **{"words/tokens": np.array([Evil()], dtype=object)})
    assert "is not a drafter cache" in refusal(file, data)
    assert not trace.exists()


def test_what_is_too_large_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An array that claims to be huge, a file that unpacks to too much, a file or a cache that is too large."""
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"shape": (10**12,), "fortran_order": False, "descr": "<i8"})
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("header.npy", npy(header(parts=SECTION)))
        archive.writestr("words/tokens.npy", stream.getvalue())
    assert "not as long as its header says" in refusal(file, file.read_bytes())
    monkeypatch.setattr(cache_file, "MAX_BYTES", 100_000)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("header.npy", npy(header(parts=SECTION)))
        archive.writestr("words/tokens.npy", npy(np.zeros(100_000, np.int32)))
    assert "takes 0 MB and a drafter cache takes at most 0 MB" in refusal(file, file.read_bytes())
    assert "a drafter cache takes at most" in refusal(file, b"x" * 100_001)
    with pytest.raises(BadParameter, match="a drafter cache takes at most"):
        made(range(1, 99_000), vocab_size=99_000).save(file, replace=True)


@pytest.mark.parametrize("wrong", [None, 5, "text", [1]])
def test_what_is_not_bytes_is_not_merged(wrong: Any) -> None:
    with pytest.raises(BadParameter, match=f"what was received must be bytes, .* got {type(wrong).__name__}"):
        DrafterCache().merge_bytes(wrong)


def test_a_newer_format_is_refused_by_name(file: Path) -> None:
    message = refusal(file, npz(header=header(format=2)))
    assert "has format 2 and this version of leapahead reads format 1; update leapahead" in message
    data = npz(header=header(parts={"words": {"layout": 2, "arrays": ["tokens"]}}), **{"words/tokens": np.array([1])})
    assert "has the section 'words' in layout 2, and the installed package reads layout 1" in refusal(file, data)


def test_a_save_never_replaces_another_file(file: Path) -> None:
    file.write_text("my diary")
    with pytest.raises(BadParameter, match="is not a drafter cache of leapahead"):
        made([1]).save(file)
    assert file.read_text() == "my diary"
    made([5], tokenizer="U").save(file, replace=True)
    with pytest.raises(BadParameter, match="of the tokenizer 'T'; use another file for each vocabulary"):
        made([1]).save(file)
    assert words(DrafterCache.load(file)) == [5]


LONG = 300 * "a"  # no name of a file


def test_a_cache_that_cannot_be_saved_or_loaded(tmp_path: Path) -> None:
    with pytest.raises(BadParameter, match="has no file; name the file"):
        made([1]).save()
    with pytest.raises(BadParameter, match="belongs to no vocabulary yet"):
        DrafterCache().save(tmp_path / "m.npz")
    with pytest.raises(BadParameter, match=r"cannot be written to .*none.m.npz \(.*No such file.*folder that exists"):
        made([1]).save(tmp_path / "none" / "m.npz")
    with pytest.raises(BadParameter, match="cannot be written, because it is a folder"):
        made([1]).save(tmp_path)
    with pytest.raises(BadParameter, match="there is no drafter cache"):
        DrafterCache.load(tmp_path / "none.npz")
    with pytest.raises(BadParameter, match=r"cannot be read \(File name too long\)"):
        DrafterCache.load(tmp_path / LONG)
    with pytest.raises(BadParameter, match=r"cannot be written to .* \(File name too long\)"):
        made([1]).save(tmp_path / LONG)
    for use in (DrafterCache.load, made([1]).save, DrafterCache().merge):
        with pytest.raises(BadParameter, match="no path of a file has a null character"):
            use("x\0y")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), r"\(No space left on device\); free some space"),
        (PermissionError(errno.EACCES, "Permission denied"), r"\(.*Permission denied\); name a file in a folder"),
        (KeyboardInterrupt(), None),
    ],
)
@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_a_save_that_fails_leaves_the_file_as_it_was(
    file: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, says: str, function: str
) -> None:
    cache = made([1])
    cache.save(file)
    before = file.read_bytes()

    def fail(*_: Any) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(os, function, fail)
        words(cache).append(2)
        with pytest.raises(BadParameter if says else KeyboardInterrupt, match=says):
            cache.save()
    assert file.read_bytes() == before
    assert os.listdir(file.parent) == [file.name]
    cache.save()
    assert words(DrafterCache.load(file)) == [1, 2]


# ------------------------------------------------------------------------------------------------- several processes


def test_a_save_merges_what_was_saved_meanwhile(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made([1]).save(file)
    one, two = DrafterCache.load(file), DrafterCache.load(file)
    words(one).append(2)
    words(two).append(3)
    two.section("others", lambda: Words([7]))
    one.save()
    two.save()
    assert words(DrafterCache.load(file)) == words(two) == [2, 1, 3]
    one.save()  # reads what two added
    assert set(words(one)) == {1, 2, 3}
    assert words(one, "others") == [7]
    monkeypatch.setattr(Words, "merge", lambda self, arrays: pytest.fail("merged with its own save"))
    one.save()
    one.save()


WORKER = """
import sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_drafter_cache import Words
from leapahead.drafters import cache_file
from leapahead.drafters.cache import DrafterCache
if {without_fcntl}:
    cache_file.fcntl = None
first, file, go = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
cache = DrafterCache()
cache.belong("T", 1000)
own = cache.section("words", Words)
print("ready", flush=True)
while not go.exists():
    time.sleep(0.001)
for n in range(first, first + 15):
    own.tokens.append(n)
    cache.save(file)
print("done", flush=True)
"""


@pytest.mark.slow
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
    assert set(found) == {*range(15), *range(100, 115)}
    assert [n for n in found if n < 100] == list(range(15))  # each in its own order
    go.unlink()
    assert os.listdir(file.parent) == [file.name]


@pytest.mark.skipif(cache_file.fcntl is None, reason="locks of the operating system")
@pytest.mark.skipif(cache_file.fcntl is None, reason="Windows has no such locks")
def test_no_file_stays_open_where_there_are_no_locks(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(handle: int, how: int) -> None:
        opened.append(handle)
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    opened: list[int] = []
    monkeypatch.setattr(cache_file.fcntl, "flock", refuse)
    with pytest.raises(OSError, match="No locks available"), cache_file.locked(file):
        pass
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened[0])


def test_a_lock_is_waited_for_and_that_of_a_dead_process_is_free(file: Path) -> None:
    code = f"""
import time
from pathlib import Path
from leapahead.drafters import cache_file
with cache_file.locked(Path({str(file)!r})):
    print("locked", flush=True)
    time.sleep(60)
"""
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    cache = made([1])
    saving = threading.Thread(target=lambda: cache.save(file))
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        with (
            pytest.raises(BadParameter, match=r"another process has been saving to .* delete .*\.cache\.npz\.lock"),
            cache_file.locked(file, timeout=0.1),
        ):
            pass
        saving.start()
        saving.join(0.1)
        assert saving.is_alive()
    finally:
        holder.kill()
        holder.communicate()
    saving.join(10)
    assert words(DrafterCache.load(file)) == [1]
    assert os.listdir(file.parent) == [file.name]


# ------------------------------------------------------------------------------------------------------------- LLM


class InOrder(Words):
    def merge(self, arrays: Arrays) -> None:
        self.tokens[:0] = arrays["tokens"].tolist()


class Successors(SequenceDrafter):
    """Drafts what followed the last token in the text before; learns at the end of a text."""

    name: ClassVar[str] = "successors"

    def begin(self, sequence: SequenceView) -> None:
        self.successor: dict[int, int] = {}
        if sequence.drafter_cache is not None:
            self.successor = dict(pairwise(sequence.drafter_cache.section("in-order", InOrder).tokens))

    def propose(self, sequence: SequenceView, budget: Budget) -> Proposal:
        token = self.successor.get(sequence.root)
        return Proposal(TokenTree.chain(sequence.root, [] if token is None or not budget.nodes else [token]))

    def finish(self, sequence: SequenceView) -> None:
        if sequence.drafter_cache is not None:
            sequence.drafter_cache.section("in-order", InOrder).tokens[:] = sequence.tokens


def llm(**options: Any) -> LLM:
    return LLM(ToyTarget(), drafter=Successors, **options)


def length(model: LLM) -> float:
    return model.generate(PROMPT, max_new_tokens=40).stats.acceptance_length


def test_a_text_teaches_the_next_one() -> None:
    model = llm()
    plain = model.generate(PROMPT, max_new_tokens=40)
    again = model.generate(PROMPT, max_new_tokens=40)
    assert again.tokens == plain.tokens
    assert plain.stats.acceptance_length == 1.0 < again.stats.acceptance_length
    with model.without_drafter_cache():
        assert model.drafter_cache is None
        assert length(model) == 1.0
    assert length(model) == again.stats.acceptance_length
    assert length(llm()) == 1.0


class Noted(Successors):
    """Notes what each text begins with."""

    seen: ClassVar[list[dict[int, int]]] = []

    def begin(self, sequence: SequenceView) -> None:
        super().begin(sequence)
        self.seen.append(self.successor)


def test_a_comparison_drafts_from_the_file_and_not_from_the_text_itself(file: Path) -> None:
    earlier = llm(drafter_cache=file)
    taught = dict(pairwise([4, 5, *earlier.generate([4, 5], max_new_tokens=20).tokens]))
    earlier.save_drafter_cache()
    model = LLM(ToyTarget(), drafter=Noted, drafter_cache=file)
    kept, drafted = model.drafter_cache, model.generate(PROMPT, max_new_tokens=5)
    Noted.seen.clear()
    compare(model, PROMPT, drafted, rounds=2, max_new_tokens=5)
    assert Noted.seen == [taught, taught], "once in each round; plain decoding has another drafter"
    assert model.drafter_cache is kept


def test_an_interrupted_text_teaches_the_next_one() -> None:
    model = llm()
    pieces = model.stream(PROMPT, max_new_tokens=40)
    for _ in range(20):
        next(pieces)
    pieces.close()
    assert length(model) > 1.0


def test_without_a_drafter_cache_nothing_is_kept() -> None:
    model = llm(drafter_cache=False)
    assert [length(model), length(model)] == [1.0, 1.0]
    with pytest.raises(BadParameter, match="drafter_cache=False keeps nothing"):
        model.save_drafter_cache("somewhere")


def test_a_file_carries_a_cache_from_one_llm_to_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = llm(drafter_cache="cache.npz")  # not there yet
    plain = first.generate(PROMPT, max_new_tokens=40)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    file = first.save_drafter_cache()
    assert file == tmp_path / "cache.npz"
    assert os.listdir() == []
    drafted = llm(drafter_cache=str(file)).generate(PROMPT, max_new_tokens=40)
    assert drafted.tokens == plain.tokens
    assert drafted.stats.acceptance_length > plain.stats.acceptance_length == 1.0
    assert DrafterCache.load(file).tokenizer == f"vocabulary of {ToyTarget().info.vocab_size}"
    model = llm()
    with pytest.raises(BadParameter, match="has no file; name the file to save it to"):
        model.save_drafter_cache()
    assert model.save_drafter_cache(tmp_path / "another.npz") == tmp_path / "another.npz"


@pytest.mark.slow
def test_a_file_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shell does not expand the `~` of `--drafter-cache=~/drafts.npz`."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for _ in range(2):  # written, and then read
        with LLM(drafter="recycling", drafter_cache="~/drafts.npz") as llm:
            llm.generate("import os\n", max_new_tokens=4)
            assert llm.save_drafter_cache() == tmp_path / "drafts.npz"
    assert CliRunner().invoke(main, ["cache", "show", "~/drafts.npz"]).exit_code == 0
    assert llm.save_drafter_cache("~/copy.npz") == tmp_path / "copy.npz"
    assert DrafterCache.load("~/copy.npz").path == tmp_path / "copy.npz"


def test_llms_share_a_cache_of_their_vocabulary_only() -> None:
    cache = DrafterCache()
    first, second = llm(drafter_cache=cache), llm(drafter_cache=cache)
    length(first)
    assert length(second) > 1.0
    with pytest.raises(BadParameter, match="belongs to a vocabulary of 12 and the model has a vocabulary of 13"):
        LLM(ToyTarget(vocab_size=13), drafter_cache=cache)


@pytest.mark.parametrize("wrong", [None, 3, "", b"file"])
def test_another_argument_is_refused(wrong: Any) -> None:
    with pytest.raises(
        BadParameter, match=r"drafter_cache=.* is not possible: it must be True, False, a file, or a DrafterCache"
    ):
        llm(drafter_cache=wrong)


def test_a_file_is_read_before_the_model_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "diary.txt").write_text("dear diary")
    for wrong, says in [
        (tmp_path / "diary.txt", "is not a drafter"),
        (tmp_path / "diary.txt" / "m", "does not exist"),
        (tmp_path / "none" / "m", "does not exist"),
        (tmp_path / LONG, "File name too long"),
        ("x\0y", "drafter_cache='x.*y' is not possible: no path of a file has a null character"),
    ]:
        with pytest.raises(BadParameter, match=says):
            LLM("no/such-model", drafter_cache=wrong)


CODE = "def fibonacci(n):\n    if n < 2:\n        return n\n    return "


@pytest.mark.slow
def test_a_saved_cache_of_the_bundled_model(file: Path, tokenizer: Any) -> None:
    """It drafts a repeated prompt better, sampled too; and a model with another tokenizer refuses it."""
    loaded = LLM(dtype="float32", drafter_cache=False)

    def over(**options: Any) -> LLM:
        return LLM(loaded.target, **{"tokenizer": loaded.tokenizer, "drafter": "suffix", **options})

    for temperature in (0.0, 1.0):
        options: dict[str, Any] = {"max_new_tokens": 60, "temperature": temperature, "seed": 1}
        first = over(drafter_cache=file)
        fresh = first.generate(CODE, **options)
        first.save_drafter_cache()
        drafted = over(drafter_cache=file).generate(CODE, **options)
        assert fresh.tokens == drafted.tokens == loaded.generate(CODE, drafter="plain", **options).tokens
        assert drafted.stats.acceptance_length > 1.5 * fresh.stats.acceptance_length
    saved = DrafterCache.load(file).tokenizer
    with pytest.raises(BadParameter) as refused:
        over(tokenizer=tokenizer, drafter_cache=file)
    assert f"the drafter cache {file} belongs to the tokenizer '{saved}' and the model has the" in str(refused.value)
    with pytest.raises(BadParameter, match=f"belongs to the tokenizer '{saved}' and the model has .*'vocabulary of "):
        over(tokenizer=None, drafter_cache=file)


# ---------------------------------------------------------------------------------------------------------- commands


def command(*arguments: object) -> Any:
    """`leapahead cache ...`"""
    from leapahead.cli import main

    result = CliRunner().invoke(main, ["cache", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.mark.usefixtures("installed")
def test_show(file: Path) -> None:
    cache = made([1, 2, 3])
    cache.section("theirs", lambda: Words([5]))
    cache.section("suffix", PastTexts).add([1, 2, 3, 4, 5])
    cache.save(file)
    shown = command("show", file)
    assert (shown.exit_code, shown.stderr) == (0, "")
    first, titles, *rows = shown.stdout.splitlines()
    assert first == f"{file}: {file.stat().st_size / 1e3:.1f} kB, tokenizer T, vocabulary of 100"
    assert titles.split() == ["section", "kB", "contents"]
    assert [row.split()[0] for row in rows] == ["words", "suffix", "theirs"]
    assert rows[0].endswith("0.0  words 3")
    assert "texts 1, tokens 5, " in rows[1]
    assert rows[2].endswith("0.0  tokens [1] (arrays of a package that is not installed)")
    found = json.loads(command("show", file, "--json").stdout)
    assert (found["tokenizer"], found["vocab_size"], found["bytes"]) == ("T", 100, file.stat().st_size)
    assert found["sections"]["words"] == {
        "installed": True,
        "layout": 1,
        "bytes": 12,
        "arrays": {"tokens": [3]},
        "figures": {"words": 3},
    }
    file.write_text("my diary")
    shown = command("show", file)
    assert (shown.exit_code, shown.stdout) == (2, "")
    assert shown.stderr.startswith(f"error: {file} is not a drafter cache of leapahead")
    assert shown.stderr.count("\n") == 1


@pytest.mark.usefixtures("installed")
def test_merge(tmp_path: Path) -> None:
    one, two, out = (tmp_path / name for name in ("one", "two", "out"))
    made([1, 2]).save(one)
    cache = made([2, 3])
    cache.section("suffix", PastTexts).add([1, 2, 3, 4, 5])
    cache.save(two)
    merged = command("merge", one, two, "-o", out)
    assert merged.exit_code == 0
    assert merged.stdout == f"{out}: {out.stat().st_size / 1e3:.1f} kB, from 2 files\n"
    found = cache_sections.load(out)
    assert words(found) == [1, 2, 3]
    assert content(found.section("suffix", PastTexts))["tokens"] == [1, 2, 3, 4, 5]
    again = command("merge", two, one, "-o", out)
    assert (again.exit_code, again.stderr) == (
        2,
        f"error: {out} exists; name another file, or replace it with --force\n",
    )
    command("merge", two, one, "-o", out, "--force")
    assert words(DrafterCache.load(out)) == [3, 1, 2]
    made([1], tokenizer="U").save(two, replace=True)
    refused = command("merge", one, two, "-o", tmp_path / "new")
    assert refused.exit_code == 2
    assert f"{one} belongs to the tokenizer 'T' and cannot be merged with" in refused.stderr
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("error", "code"), [(None, 0), (KeyboardInterrupt, 1), (click.ClickException, 1)])
def test_a_command_saves_at_exit_whatever_happens(file: Path, error: Any, code: int) -> None:
    from leapahead.cli.cache import DRAFTER_CACHE, drafter_cache_argument, save_at_exit
    from leapahead.cli.options import all_of

    @click.command()
    @all_of(DRAFTER_CACHE)
    def draft(**values: Any) -> None:
        model = save_at_exit(llm(drafter_cache=drafter_cache_argument(values)))
        assert values == {}
        length(model)
        if error is not None:
            raise error("stop")

    assert CliRunner().invoke(draft, []).exit_code == code
    assert os.listdir(file.parent) == []
    assert CliRunner().invoke(draft, ["--drafter-cache", str(file)]).exit_code == code
    assert length(llm(drafter_cache=file)) > 1.0
