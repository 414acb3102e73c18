"""Which form the KV cache of a GGUF file has where the user names none, and what is told of it."""

from __future__ import annotations

import ctypes
import json
import logging
import re
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from helpers import GREEDY

from leapahead import LLM
from leapahead.cli import main
from leapahead.core.errors import BadParameter, CacheFull, Refused
from leapahead.core.tree import TokenTree
from leapahead.drafters import registry
from leapahead.engine.turn import THREADS_LOST, Turn
from leapahead.models import loading, memory
from leapahead.models.base import read_prompt

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")

import gguf_architectures
import gguf_models

from leapahead.models.llama_cpp import context, form
from leapahead.models.llama_cpp.options import LlamaCppOptions
from leapahead.models.llama_cpp.separate import SeparateLlamaCppTarget

MANY = form.FEW + 1
SMALL: dict[str, Any] = {"n_ctx": 256, "n_threads": 1}


@pytest.fixture(autouse=True)
def _free(monkeypatch: pytest.MonkeyPatch) -> None:
    """So much memory is free, whatever else the machine does."""
    monkeypatch.setattr(form, "free_host_bytes", lambda: 2 * 10**9)


def loaded(path: Path | None = None, sequences: int | None = MANY, **options: Any) -> Any:
    return loading.load(path or gguf_models.llama(), sequences=sequences, **SMALL, **options).target


def test_many_sequences_have_a_cache_each(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "leapahead.llama_cpp"):
        target = loaded()
    assert isinstance(target, SeparateLlamaCppTarget)
    assert (target.context.n_seq_max, target.info.context_length) == (MANY, 256)
    assert target.info.kv_cache.startswith(f"a KV cache of 256 tokens for each of {MANY} sequences, since")
    assert [each for each in caplog.messages if target.info.kv_cache in each]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"sequences": form.FEW}, f"no more than {form.FEW} are decoded together"),
        ({"branching": "lookahead"}, "the drafter 'lookahead' drafts branches"),
        ({"n_seq_max": 32}, "n_seq_max=32 sets the number of branches"),
        ({"sequences": 257}, "llama.cpp computes at most 256 sequences with one each"),
        ({"n_ubatch": 8}, "llama.cpp computes at most 8 sequences with one each"),
        ({"sequences": 256}, r"would take \d+\.\d of \d+\.\d GB free memory"),
    ],
)
def test_what_speaks_against_it(options: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if options.get("sequences") == 256:
        monkeypatch.setattr(form, "free_host_bytes", lambda: 10**7)
    target = loaded(**options)
    assert not isinstance(target, SeparateLlamaCppTarget)
    assert re.search(f"^one KV cache for all sequences, since .*{why}", target.info.kv_cache)


def test_a_recurrent_state_speaks_against_it() -> None:
    target = loaded(gguf_architectures.BY_NAME["mamba"].path())
    assert not isinstance(target, SeparateLlamaCppTarget)
    assert target.info.kv_cache.endswith("the model has a recurrent state for each anyway")


def test_so_does_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(form.c, "llama_supports_gpu_offload", lambda: True)
    assert loaded().info.kv_cache.endswith("one for each was measured on CPUs only")
    assert isinstance(loaded(n_gpu_layers=0), SeparateLlamaCppTarget)


def test_a_forked_process_cannot_use_its_parents_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for has_gpu, layers, refused in ((True, None, True), (True, 0, False), (False, None, False)):
        monkeypatch.setattr(form.c, "llama_supports_gpu_offload", lambda has_gpu=has_gpu: has_gpu)
        target = loaded(**({} if layers is None else {"n_gpu_layers": layers}))
        turn = Turn(target)
        turn.forked()
        assert (turn.changed.lost is THREADS_LOST) == refused


def test_layers_for_a_gpu_that_llama_cpp_cannot_use_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(form.c, "llama_supports_gpu_offload", lambda: False)
    with pytest.warns(UserWarning, match="^n_gpu_layers=99 .*has no effect, because llama.cpp was built without"):
        loaded(n_gpu_layers=99)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded()
        loaded(n_gpu_layers=0)


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["-q"], ["--json"], ["--no-stream"]])
def test_a_text_that_the_context_ends_is_told(more: list[str]) -> None:
    command = ["generate", "-m", str(gguf_models.llama()), "-c", "256", "--threads", "1", "-d", "plain", "--ignore-eos"]
    ended = CliRunner().invoke(main, [*command, *more, "-n", "3000", "def"])
    assert re.search(r"(?m)^the text ends after 2\d\d tokens, because the context of 256 tokens is full$", ended.stderr)
    assert "context" not in CliRunner().invoke(main, [*command, *more, "-n", "8", "def"]).stderr
    refused = CliRunner().invoke(main, [*command, *more, "-n", "8", "def " * 300])
    assert refused.stderr.endswith("shorten it, or load the model with a larger --ctx-size\n")


def test_a_chat_on_a_terminal_goes_on_after_a_message_that_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("click.testing._NamedTextIOWrapper.isatty", lambda self: True)
    monkeypatch.setitem(sys.modules, "readline", None)  # as on Windows
    given = ["chat", "-m", str(gguf_models.llama()), "-c", "256", "--threads", "1", "-d", "plain", "-n", "2"]
    result = CliRunner().invoke(main, given, input="def " * 300 + "\n/help\n")
    assert result.exit_code == 0
    assert "shorten it, or load the model with a larger --ctx-size; /reset" in result.stderr


def test_what_the_user_names_is_taken() -> None:
    for named in (True, False):
        for sequences in (None, 2, MANY):
            target = loaded(sequences=sequences, kv_unified=named)
            assert isinstance(target, SeparateLlamaCppTarget) is not named
            assert target.info.kv_cache == ""
    assert loaded(sequences=None).info.kv_cache == ""  # it is not known how many there will be
    assert not isinstance(loaded(exact=True), SeparateLlamaCppTarget)


def test_an_llm_has_the_form_for_its_batch_and_drafter() -> None:
    with LLM(gguf_models.llama(), **SMALL) as usual:
        assert not isinstance(usual.target, SeparateLlamaCppTarget)
    with LLM(gguf_models.llama(), max_batch=MANY, drafter="lookahead", **SMALL) as branching:
        assert not isinstance(branching.target, SeparateLlamaCppTarget)
    with pytest.raises(BadParameter, match="max_batch=257 is not possible with kv_unified=False"):
        LLM(gguf_models.llama(), max_batch=257, kv_unified=False, **SMALL)
    with LLM(gguf_models.llama(), max_batch=MANY, **SMALL) as many:
        assert isinstance(many.target, SeparateLlamaCppTarget)
        with pytest.raises(Refused, match=r"needs tree .* \(kv_unified gives one for all\)"):
            many.generate([1, 2, 3], drafter="lookahead")


def shared(path: Path | None = None, sequences: int | None = 3, **options: Any) -> tuple[int, int]:
    """Texts of the greatest length for which the cache of all sequences has room, and that length."""
    info = loading.load(path or gguf_models.llama(), sequences=sequences, n_threads=1, **options).target.info
    return info.cache_tokens // info.context_length, info.context_length


def test_one_cache_has_room_for_a_text_of_each_sequence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where neither its size nor its form is named: the size that is named is that of all sequences."""
    assert shared() == (3, 512)
    assert shared(gguf_architectures.BY_NAME["gemma3"].path()) == (3, 256)  # with a sliding window
    assert shared(sequences=MANY, branching="lookahead") == (MANY, 512)
    for options in ({"n_ctx": 512}, {"n_ctx": 0}, {"n_seq_max": 8}, {"kv_unified": True}, {"sequences": None}):
        assert shared(**options) == (1, 512), options
    assert shared(gguf_architectures.BY_NAME["jamba"].path()) == (1, 256)
    assert loading.load(gguf_architectures.BY_NAME["mamba"].path(), sequences=3).target.info.cache_tokens == 0
    with monkeypatch.context() as patched:
        patched.setattr(form.c, "llama_supports_gpu_offload", lambda: True)
        assert shared()[0] == 1
        assert shared(n_gpu_layers=0)[0] == 3
    factors = {f"rope_factors_{each}.weight": np.ones(4, np.float32) for each in ("short", "long")}
    scaled = {"llama.rope.scaling.type": "longrope"}
    assert shared(gguf_models.rewritten(gguf_models.llama(), tmp_path / "long.gguf", scaled, factors)) == (1, 512)
    size = form.cache_bytes(context.Model(gguf_models.llama(), LlamaCppOptions()), LlamaCppOptions())
    for texts, fitting in ((0.5, 1), (2.5, 2)):
        monkeypatch.setattr(form, "free_host_bytes", lambda texts=texts: texts * size / form.MOST_MEMORY)
        assert shared() == (fitting, 512)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_texts_of_the_greatest_length_are_decoded_together(name: str) -> None:
    """Requests that name no length reserve all of it; their texts are those of a cache of the usual size."""
    path = gguf_architectures.BY_NAME[name].path()
    prompts: list[list[int]] = [[5, 6, 7, 8], [9, 8, 7], [5, 6, 7, 4, 3]]
    with LLM(path, n_threads=1) as usual, LLM(path, n_threads=1, max_batch=3) as several:
        length = usual.target.info.context_length
        assert (usual.target.info.cache_tokens, usual.engine.max_batch) == (length, 8)
        assert several.target.info.kv_cache.endswith(f"decoded together; it has room for 3 texts of {length} tokens")
        opened = [several.target.open(prompt, GREEDY, reserve=length) for prompt in prompts]
        with pytest.raises(CacheFull):
            several.target.open(prompts[0], GREEDY, reserve=length)
        for session in opened:
            session.close()
        asked: Any = {"max_new_tokens": length, "ignore_eos": True, "drafter": "prompt_lookup"}
        found = [each.tokens for each in several.generate(prompts, **asked)]
        assert found == [each.tokens for each in usual.generate(prompts, **asked)]
        assert [len(prompt) + len(new) for prompt, new in zip(prompts, found, strict=True)] == [length] * 3


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_draft_model_has_room_for_all_texts_of_its_target(name: str) -> None:
    """In its one cache, also where its positions are learned; they bound the length of each text, as before."""
    path = gguf_models.llama() if name == "llama" else gguf_architectures.BY_NAME[name].path()
    drafts: dict[str, Any] = {"drafter": "draft_model", "draft": path, "nodes": 3, "depth": 3, "chain": True}
    with LLM(path, max_batch=MANY, **drafts, **SMALL) as llm:
        assert isinstance(llm.target, SeparateLlamaCppTarget)
        prompts = [[3 + (7 * text + each) % 50 for each in range(60)] for text in range(MANY)]
        for _ in range(2):
            for result in llm.generate(prompts, max_new_tokens=12, ignore_eos=True):
                assert "stopped" not in result.stats.drafter["draft"]
                assert result.stats.accepted > 0
        drafter: Any
        for drafter in (llm.drafter, llm.engine.drafter("draft_model", draft=str(path))):
            (model,) = drafter.draft_forwards.models
            info = model.target.info
            assert (info.context_length, info.cache_tokens >= llm.target.info.cache_tokens) == (256, True)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs a command on a small file with many sequences; returns the form of its KV cache, and standard error."""
    found: list[Any] = []
    original = loading.load

    def load(*args: Any, **options: Any) -> Any:
        found.append(original(*args, **options))
        return found[-1]

    monkeypatch.setattr(loading, "load", load)
    monkeypatch.setenv("LEAPAHEAD_CACHE", str(tmp_path))

    def run(*args: str, batch: int = MANY) -> tuple[bool, str]:
        model = ("-m", str(gguf_models.bundled("f32")), "-c", "256", "--threads", "1", "--batch", str(batch))
        result = CliRunner().invoke(main, [*args, *model, "--max-new-tokens", "4"])
        assert result.exit_code == 0, result.output
        return isinstance(found.pop().target, SeparateLlamaCppTarget), result.stderr

    return run


@pytest.mark.slow
def test_commands_that_measure_have_the_form_of_an_llm(command: Any, tmp_path: Path) -> None:
    check, prompts = ("check", "--limit", "1", "-d", "plain"), tmp_path / "prompts.txt"
    prompts.write_text("".join(f"def f{each}(\n" for each in range(MANY)))
    bench = (
        "bench",
        "--data",
        str(prompts),
        "--rounds",
        "1",
        "-t",
        "0",
        "-d",
        "jacobi",
        "--out",
        str(tmp_path / "out"),
    )
    for args in (check, bench, ("tune", "--seconds", "0.1", "--text-seconds", "0.1", "--limit", "1")):
        separate, errors = command(*args)
        assert (separate, errors.count("a KV cache of 256 tokens for each of 9 sequences")) == (True, 1), args
    conditions = json.loads((tmp_path / "out" / "bench.json").read_text())["conditions"]
    (form,) = conditions["kv_cache"].values()
    assert form["chosen"].startswith("a KV cache of 256 tokens for each")
    separate, errors = command(*check, "-d", "lookahead")
    assert not separate
    assert errors == "one KV cache for all sequences, since the drafter 'lookahead' drafts branches\n"
    assert command(*check, "--kv-unified") == (False, "")
    assert command(*check, batch=1) == (False, "")


def test_drafters_that_need_branches() -> None:
    needing = {name for name in registry.BUILT_IN if registry.branching(name)}
    assert "lookahead" in needing
    assert registry.branching("auto", "plain", *sorted(needing)) == min(needing)
    assert not needing & {"auto", "plain", "prompt_lookup", "prediction", "draft_model", "head"}


@pytest.mark.parametrize(
    "types", [{}, pytest.param({"type_k": "f16", "type_v": "f16"}, marks=pytest.mark.slow)], ids=["default", "float16"]
)
@pytest.mark.parametrize(("name", "most"), [("llama", 1.02), ("gemma2", 1.02), ("deepseek2", 2.0)])
def test_the_memory_of_a_cache(name: str, most: float, types: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """The estimate is what llama.cpp says that it allocates, or more: of latent attention, it keeps no values."""
    path = gguf_models.llama() if name == "llama" else gguf_architectures.BY_NAME[name].path()
    options = LlamaCppOptions(kv_unified=False, n_ctx=2048 - form.MOST_NODES, **types)
    with caplog.at_level(logging.INFO, "leapahead.llama_cpp"):
        model = context.Model(path, options)
        caplog.clear()
        SeparateLlamaCppTarget(model, options)
    sizes = [float(size) for size in re.findall(r"KV buffer size *= *([\d.]+) MiB", caplog.text)]
    assert 0.98 <= form.cache_bytes(model, options) / (sum(sizes) * 2**20 / 8) <= most


@pytest.mark.parametrize(
    ("options", "tree", "words"),
    [
        (
            {},
            TokenTree.chain(3, range(4, 260)),
            "a step of 257 rows is more than the 256 that one may have; give shorter",
        ),
        (
            {"kv_unified": False},
            TokenTree([3, 4, 5], [-1, 0, 0]),
            "with branches is not possible with a KV cache for each",
        ),
        (
            {"exact": True},
            TokenTree([3, 4, 5], [-1, 0, 0]),
            "with branches is not possible in exact mode; give a chain",
        ),
        (
            {"exact": True},
            TokenTree.chain(3, range(4, 12)),
            "a step of 9 rows is more than the 8 .*; give shorter drafts$",
        ),
    ],
)
def test_steps_that_are_refused(options: dict[str, Any], tree: TokenTree, words: str) -> None:
    """By one check in all forms, and nothing is lost."""
    target = loaded(sequences=None, **options)
    session = target.open([1, 2, 3], GREEDY)
    read_prompt(target, session)
    root = [TokenTree.root(3)]
    before = int(target.step([session], root)[0][0])
    with pytest.raises(BadParameter, match=words):
        target.step([session], [tree])
    assert int(target.step([session], root)[0][0]) == before


def test_padding_counts() -> None:
    """Three sequences of which one drafts 31 tokens take 96 rows of a step of 64."""
    target = loaded(sequences=None, kv_unified=False, n_batch=64, n_ubatch=64, n_seq_max=3)
    sessions = [target.open([1, 2, 3], GREEDY) for _ in range(3)]
    for session in sessions:
        read_prompt(target, session)
    trees = [TokenTree.chain(3, range(4, 4 + drafted)) for drafted in (31, 0, 0)]
    assert target.cost(sessions, trees).rows == 96
    with pytest.raises(BadParameter, match="a step of 96 rows is more than the 64"):
        target.step(sessions, trees)


def test_free_memory_under_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    class Kernel:
        def GlobalMemoryStatusEx(self, status: Any) -> None:
            assert ctypes.sizeof(status) == status[0]
            status[2] = 5 * 10**9

    monkeypatch.setattr(memory.sys, "platform", "win32")
    monkeypatch.setattr(ctypes, "windll", SimpleNamespace(kernel32=Kernel()), raising=False)
    assert memory.free_host_bytes() == 5 * 10**9
