"""llama.cpp's programs as peers: what is made of what they print, and what they are refused for."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")

import gguf_models

from leapahead.bench import peers
from leapahead.bench.cell import measure_cell
from leapahead.bench.contender import Contender, Ours, Pass, Setting
from leapahead.bench.peers import program
from leapahead.core.errors import BadParameter, LeapaheadError, Refused
from leapahead.models import loading

PROMPT = "def add(a, b):\n    # caf\u00e9 \\n , .\n"
CLOCK = """\
Read 44 bytes from binary file prompt
0.00.056.500 W llama_context: n_ctx_seq (4096) > n_ctx_train (2048) -- possible training context overflow
0.06.236.128 I encoded   {tokens} tokens in    0.020 seconds, speed:   {speed} t/s
0.06.236.143 I decoded   {n_predict} tokens in    0.051 seconds, speed:   500.000 t/s
0.06.236.149 I
"""
READ = """\
0.06.236.167 I n_predict    = {n_predict}
0.06.236.173 I n_drafted    = {n_drafted}
0.06.236.179 I t_draft      = 0.14 ms, 46.00 us per token, 21739.13 tokens per second
0.06.236.179 I n_accept     = {n_accept}
0.06.236.185 I accept       = -nan%
0.06.236.230 I common_perf_print: prompt eval time =    2892.84 ms /  {read} tokens (    2.34 ms per token)
"""
WINDOW = "0.06.236.155 I W = 15\n0.06.236.161 I N =  5\n0.06.236.167 I G = 15\n"
PROGRAM = """\
#!{python}
import json, os, signal, sys, time
from pathlib import Path
here, arguments = Path(__file__), sys.argv[1:]
if "--version" in arguments:
    print("version: 0.5.0-dev (build 1, commit 0c1e570)\\nbuilt with GNU 12.2.0", file=sys.stderr)
    sys.exit()
if "--help" in arguments:
    print("--spec-type none,draft-simple,ngram-simple,ngram-mod,ngram-cache\\n    comma-separated list of types")
    sys.exit()
plan = json.loads(here.with_suffix(".json").read_text())
prompt = Path(arguments[arguments.index("-bf") + 1]).read_bytes()
here.with_suffix(".seen").write_text(json.dumps([arguments, prompt.decode(), os.environ.get("LLAMA_ARG_TOP_K")]))
out = (b"\\n\\n" + prompt + plan["made"].encode("latin-1") + b"\\n\\n\\n\\n")[: -plan["lost"] or None]
os.write(1, out)
sys.stderr.write(plan["said"])
sys.stderr.flush()
time.sleep(plan["seconds"])
if plan["lost_once"]:
    here.with_suffix(".json").write_text(json.dumps({{**plan, "lost": 0, "lost_once": False}}))
if plan["signal"]:
    os.kill(os.getpid(), plan["signal"])
sys.exit(plan["code"])
"""


@pytest.fixture(scope="module")
def entry() -> peers.Entry:
    path = str(gguf_models.llama())
    return peers.Entry(loading.load(path, n_threads=1), path, 1)


@pytest.fixture
def setting(entry: peers.Entry) -> Setting:
    return Setting(max_new_tokens=24, eos_token_ids=entry.loaded.eos_token_ids)


class Fake:
    """A program that prints what the real one does."""

    def __init__(self, folder: Path, entry: peers.Entry) -> None:
        self.path = folder / "program"
        self.path.write_text(PROGRAM.format(python=sys.executable))
        self.path.chmod(0o755)
        assert entry.loaded.tokenizer is not None
        self.prompt = entry.loaded.tokenizer.encode(PROMPT)

    def says(self, made: bytes = b"made", said: str | None = None, extra: str = "", **options: Any) -> None:
        counts = {"n_predict": 25, "n_accept": 5, "n_drafted": 12, "read": 0, "tokens": len(self.prompt)}
        counts |= {key: options.pop(key) for key in list(options) if key in counts}
        said = (CLOCK + extra + READ).format(**counts, speed=100.0 * counts["tokens"]) if said is None else said
        plan = {"code": 0, "signal": 0, "lost": 0, "lost_once": False, "seconds": 0, **options}
        self.path.with_suffix(".json").write_text(json.dumps({**plan, "made": made.decode("latin-1"), "said": said}))

    @property
    def seen(self) -> tuple[list[str], str, str | None]:
        arguments, prompt, variable = json.loads(self.path.with_suffix(".seen").read_text())
        return arguments, prompt, variable


@pytest.fixture
def fake(tmp_path: Path, entry: peers.Entry) -> Fake:
    made = Fake(tmp_path, entry)
    made.says()
    return made


def entered(fake: Fake, entry: peers.Entry, name: str = "llama-lookup", options: str = "") -> Contender:
    (peer,) = peers.configured([f"{name}:path={fake.path}{options}"])
    return peer.enter(f"peer:{peer.label}", entry)


def ran(fake: Fake, entry: peers.Entry, setting: Setting, name: str = "llama-lookup", options: str = "") -> Pass:
    return entered(fake, entry, name, options).run([fake.prompt], setting)


@pytest.mark.parametrize("batch", [1, 2])
def test_a_first_token_that_comes_with_the_prompt_is_not_timed(entry: peers.Entry, fake: Fake, batch: int) -> None:
    """As the first one of the peers: the forward that yields it counts as prefill."""
    loaded = entry.loaded
    plain = Ours("plain", loaded.target, loaded.tokenizer, "plain")
    (text,) = plain.run([fake.prompt], Setting(max_new_tokens=6, batch=batch)).texts
    assert text.stats is not None
    assert (text.timed, text.stats.steps) == (len(text.tokens) - 1, len(text.tokens))
    (text,) = plain.run([fake.prompt], Setting(max_new_tokens=1)).texts
    assert text.timed == 1, "a text without any time would have no speed"
    (text,) = plain.run([fake.prompt[:1]], Setting(max_new_tokens=6)).texts
    assert text.timed == 6, "nothing was to be read"


def after(arguments: list[str], option: str) -> str:
    return arguments[arguments.index(option) + 1]


# ------------------------------------------------------------------------------------------------------ figures


def test_lookahead_counts_all_but_the_first_token(fake: Fake, entry: peers.Entry, setting: Setting) -> None:
    coloured = b" return\033[0;96m a\033[0m\033[0;96m +\033[0m b"
    fake.says(coloured, extra=WINDOW, read=len(fake.prompt) + 20 * 60 + 3 * 4 - 1)
    done = ran(fake, entry, setting, "llama-lookahead")
    (text,) = done.texts
    assert text.written == " return a + b"
    assert text.timed == 25
    assert text.stats is not None
    assert (text.stats.steps, text.stats.committed, text.stats.nodes) == (20, 25, 20 * 60 + 3 * 4)
    assert text.stats.drafted_by == {"lookahead": 12}
    assert text.stats.accepted_by == {"lookahead": 5}
    assert done.seconds == pytest.approx(25 / 500)
    assert done.prefill == text.first_token == pytest.approx(0.01)
    assert after(fake.seen[0], "-n") == "22"  # beyond which it stops, the first token not counted


def test_lookup_leaves_out_the_token_of_the_prefill(fake: Fake, entry: peers.Entry, setting: Setting) -> None:
    done = ran(fake, entry, setting, options=",draft_max=7")
    (text,) = done.texts
    assert text.timed == 24
    assert text.stats is not None
    assert (text.stats.steps, text.stats.committed, text.stats.nodes) == (19, 24, 19 + 12)
    assert done.seconds == pytest.approx(25 / 500)
    assert done.prefill == text.first_token == pytest.approx(0.01)
    assert after(fake.seen[0], "-n") == "23"
    assert after(fake.seen[0], "--spec-draft-n-max") == "7"


def test_speculative_simple_makes_every_token_in_its_steps(fake: Fake, entry: peers.Entry, setting: Setting) -> None:
    done = ran(fake, entry, setting, "llama-speculative-simple", ",type=ngram-mod,match=4,draft_max=9")
    (text,) = done.texts
    assert text.timed == 25
    assert text.stats is not None
    assert (text.stats.steps, text.stats.committed, text.stats.nodes) == (20, 25, 20 + 12)
    assert text.first_token == pytest.approx(0.01 + 25 / 500 / 20)
    arguments = fake.seen[0]
    assert after(arguments, "--spec-ngram-mod-n-match") == "4"
    assert after(arguments, "--spec-ngram-mod-n-max") == "9"
    assert after(arguments, "-n") == "23"


@pytest.mark.parametrize("name", ["llama-lookahead", "llama-lookup"])
def test_no_length_is_without_a_limit(fake: Fake, entry: peers.Entry, setting: Setting, name: str) -> None:
    fake.says(extra=WINDOW)
    ran(fake, entry, replace(setting, max_new_tokens=1), name)
    assert after(fake.seen[0], "-n") == {"llama-lookahead": "0", "llama-lookup": "1"}[name]


@pytest.mark.slow
def test_the_child_s_own_peak_is_told(fake: Fake, entry: peers.Entry, setting: Setting) -> None:
    """A program that ends between two readings has none; on a busy machine even a slow one may, so it runs again."""
    fake.says(seconds=0.5)
    found = [memory for _ in range(4) if (memory := ran(fake, entry, setting).memory) is not None]
    assert all(0 < memory < 100 for memory in found)
    status = Path("/proc/self/status")
    ours = status.exists() and f"Pid:\t{os.getpid()}\n" in status.read_text()  # in a container, it may be the machine's
    assert found or not ours


# ---------------------------------------------------------------------------------------------------------- text


def test_the_program_gets_our_prompt_and_settings(
    fake: Fake, entry: peers.Entry, setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_ARG_TOP_K", "40")
    ran(fake, entry, setting)
    arguments, prompt, variable = fake.seen
    assert prompt == PROMPT  # its last newline and its spaces too
    assert PROMPT not in arguments
    assert "--no-escape" in arguments
    assert variable is None
    assert [after(arguments, each) for each in ("-m", "-t", "-tb", "-ctk", "-fa")] == [
        entry.model,
        "1",
        "1",
        "f32",
        "off",
    ]
    assert [after(arguments, each) for each in ("--samplers", "--top-k", "--mirostat")] == ["top_k", "1", "0"]


@pytest.mark.parametrize(
    ("made", "written"),
    [
        (b"a\n\n", "a\n\n"),
        (b"ab<|endoftext|>cd<|endoftext|>", "ab"),
        (b"<|endoftext|>", ""),
        ("na\u00efve".encode() + b"\xc3", "na\u00efve\ufffd"),
        (b"", ""),
    ],
    ids=["newlines", "end", "only an end", "half a character", "nothing"],
)
def test_what_was_made(fake: Fake, entry: peers.Entry, setting: Setting, made: bytes, written: str) -> None:
    fake.says(made)
    assert ran(fake, entry, setting).texts[0].written == written


def test_a_text_whose_end_was_lost_is_made_again(fake: Fake, entry: peers.Entry, setting: Setting) -> None:
    fake.says(lost=3, lost_once=True)
    assert ran(fake, entry, setting).texts[0].written == "made"


# ------------------------------------------------------------------------------------------------------ failures


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"signal": 4, "said": "loading\n"}, r"was ended by SIGILL .*AMX.*: loading$"),
        ({"signal": 11, "said": ""}, "was ended by SIGSEGV: it gives no reason$"),
        ({"code": 1, "said": "a\nprompt too long\n\n"}, "ended with code 1: prompt too long$"),
        ({"said": "hello\n"}, "did not print its counter n_predict in 10 attempts: hello$"),
        ({"said": READ.format(n_predict=3, n_drafted=0, n_accept=0, read=9)}, "how long it encoded"),
        ({"lost": 3}, "did not print its whole text"),
        ({"tokens": 3}, "did not read the 19 tokens of the prompt"),
    ],
)
def test_a_failure_is_one_sentence(
    fake: Fake, entry: peers.Entry, setting: Setting, plan: dict[str, Any], message: str
) -> None:
    fake.says(**plan)
    with pytest.raises(LeapaheadError, match=message):
        ran(fake, entry, setting)


def test_a_program_that_does_not_end(
    fake: Fake, entry: peers.Entry, setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "PATIENCE", -1.0)
    with pytest.raises(LeapaheadError, match="has not ended after"):
        ran(fake, entry, setting)


@pytest.mark.slow
def test_another_program_s_counters_are_not_taken(fake: Fake, entry: peers.Entry, setting: Setting) -> None:
    with pytest.raises(LeapaheadError, match="did not print its counter W"):
        ran(fake, entry, setting, "llama-lookahead")


# ------------------------------------------------------------------------------------------- options and refusals


def test_a_path_must_run_and_be_llama_cpp_s(tmp_path: Path) -> None:
    def wrong(message: str, path: Path) -> None:
        with pytest.raises(BadParameter, match=message):
            peers.configured([f"llama-lookup:path={path}"])

    def made(name: str, text: str, mode: int = 0o755) -> Path:
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(mode)
        return tmp_path / name

    wrong("does not exist", tmp_path / "none")
    wrong("is not executable", made("plain", "#!/bin/sh\n", 0o644))
    wrong("cannot be run", made("binary", "#!/nowhere/at/all\n"))
    wrong("is not a program of llama.cpp", made("other", "#!/bin/sh\necho other 1.0\n"))
    wrong("ended with code 3: broken", made("broken", "#!/bin/sh\necho broken >&2\nexit 3\n"))
    wrong("was ended by SIGABRT", made("crash", "#!/bin/sh\nkill -6 $$\n"))
    with pytest.raises(BadParameter, match="needs path="):
        peers.configured(["llama-lookahead"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "give either draft=... or type=..."),
        (",draft={draft},type=ngram-mod", "give either draft=... or type=..."),
        (",draft=/nowhere.gguf", "there is no file '/nowhere.gguf'"),
        (",type=draft-simple", "no n-gram type 'draft-simple'; there are ngram-simple, ngram-mod, ngram-cache"),
        (",draft={draft},match=3", "no such option for a draft model"),
        (",type=ngram-cache,match=3", "no such option for ngram-cache"),
    ],
)
def test_wrong_options_of_speculative_simple(fake: Fake, entry: peers.Entry, options: str, message: str) -> None:
    with pytest.raises(BadParameter, match=message):
        peers.configured([f"llama-speculative-simple:path={fake.path}{options.format(draft=entry.model)}"])


def test_labels_tell_variants_apart_and_no_folder(fake: Fake, entry: peers.Entry) -> None:
    texts = ["type=ngram-mod", "type=ngram-simple,match=3", f"draft={entry.model}", f"draft={entry.model},draft_max=8"]
    made = peers.configured([f"llama-speculative-simple:path={fake.path},{text}" for text in texts])
    made += peers.configured([f"llama-lookup:path={fake.path}", f"llama-lookup:path={fake.path},draft_max=5"])
    labels = [peer.label for peer in made]
    assert labels[0] == "llama-speculative-simple(type=ngram-mod)"
    assert labels[-1] == "llama-lookup(draft_max=5)"
    assert len(set(labels)) == len(labels)
    assert not any("/" in label for label in labels)
    assert {peer.version() for peer in made} == {"llama.cpp 0.5.0-dev (build 1, commit 0c1e570)"}


def test_only_a_gguf_file_of_ours_is_entered(fake: Fake, entry: peers.Entry) -> None:
    with pytest.raises(Refused, match=r"llama\.cpp runs GGUF files only"):
        entered(fake, peers.Entry(loading.load(dtype="float32")))


def test_a_draft_with_another_vocabulary_is_refused(fake: Fake, entry: peers.Entry) -> None:
    assert entered(fake, entry, "llama-speculative-simple", f",draft={entry.model}")
    other = gguf_models.llama(seed=1, vocab_size=4100)
    with pytest.raises(Refused, match="a vocabulary of 4100 tokens and the target one of 4096"):
        entered(fake, entry, "llama-speculative-simple", f",draft={other}")


def test_refusals_of_a_cell(fake: Fake, entry: peers.Entry, setting: Setting) -> None:
    contender, tokenizer = entered(fake, entry), entry.loaded.tokenizer
    assert tokenizer is not None
    split = [token for letter in "return" for token in tokenizer.encode(letter)]
    assert contender.refusal([fake.prompt], setting) is None
    assert "random numbers" in str(contender.refusal([fake.prompt], replace(setting, temperature=1.0)))
    assert "one text at a time" in str(contender.refusal([fake.prompt], replace(setting, batch=2)))
    assert "end tokens" in str(contender.refusal([fake.prompt], replace(setting, eos_token_ids=(0, 5))))
    assert "1 of 2 prompts as other tokens" in str(contender.refusal([fake.prompt, split], setting))


# ---------------------------------------------------------------------------------------------------- for real


@pytest.mark.skipif("LEAPAHEAD_LLAMA_CPP_BIN" not in os.environ, reason="no folder of llama.cpp's programs is named")
@pytest.mark.parametrize(
    ("name", "options"),
    [("llama-lookahead", ""), ("llama-lookup", ""), ("llama-speculative-simple", ",type=ngram-simple,match=3")],
)
def test_the_real_program_writes_our_text(name: str, options: str) -> None:
    path = str(gguf_models.bundled("f32"))
    entry = peers.Entry(loading.load(path, n_threads=1), path, 1)
    tokenizer = entry.loaded.tokenizer
    assert tokenizer is not None
    folder = Path(os.environ["LEAPAHEAD_LLAMA_CPP_BIN"])
    (peer,) = peers.configured([f"{name}:path={folder / name}{options}"])
    contenders = [Ours("plain", entry.loaded.target, tokenizer, "plain"), peer.enter("peer", entry)]
    setting = Setting(max_new_tokens=24, eos_token_ids=entry.loaded.eos_token_ids)
    prompts = [tokenizer.encode(PROMPT), tokenizer.encode("def f(x):\n    return x\n" * 4)]
    assert contenders[1].refusal(prompts, setting) is None
    plain, theirs = measure_cell(
        contenders, prompts, setting, rounds=1, seed=0, judge=lambda *_: False, tokenizer=tokenizer
    )
    assert theirs["mismatches"] == 0
    assert theirs["acceptance_length"] >= 1.0
    assert theirs["steps"] <= theirs["nodes"]
    assert 0 <= theirs["tokens"] - plain["tokens"] + len(prompts) <= 64
    assert 0 < theirs["peak_memory_mib"] < 1000
