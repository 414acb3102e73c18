"""llama.cpp's own speculative programs on the target's GGUF file: lookahead, prompt lookup, draft models.

One process for each prompt. The times are those that the program prints, without its start and the load of the file.
The programs differ in which forward yields the first token and in where they stop; each class documents how its
counters are read.
"""

from __future__ import annotations

import ctypes
import math
import re
import sys
import tempfile
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from leapahead.bench.contender import Contender, Pass, Setting, Text
from leapahead.bench.peers import Entry, Peer, executable, where
from leapahead.bench.peers.program import last_line, output_of, run
from leapahead.core.errors import BadParameter, LeapaheadError, Refused
from leapahead.core.stats import Stats, Tally

if TYPE_CHECKING:  # only a GGUF file needs llama-cpp-python
    from leapahead.models.llama_cpp.model import LlamaCppTarget

ROOM = 256  # cache cells beyond the text, for drafts
TRIES = 10  # the programs exit without flushing their log, which may be lost on a busy machine
END = b"\n\n\n\n"  # the end of stdout, logged last
COLOURS = (b"\033[0;96m", b"\033[0m")  # printed by llama-lookahead around accepted text, whatever its options
Counts = dict[str, int]  # counters that a program prints, and "read": tokens of all forwards with several tokens


@dataclass(frozen=True)
class Program(Peer):
    """A program of llama.cpp's examples.

    Attributes:
        counters: names of the counters that it prints.
    """

    path: str = where("the path of llama.cpp's program of that name")
    counters: ClassVar[tuple[str, ...]] = ("n_predict", "n_accept", "read")

    def __post_init__(self) -> None:
        self.version()

    def version(self) -> str:
        return f"llama.cpp {_version(executable(self.path))}"

    def enter(self, name: str, entry: Entry) -> Contender:
        target, module = entry.loaded.target, sys.modules.get("leapahead.models.llama_cpp.model")
        if module is None or not isinstance(target, module.LlamaCppTarget):
            raise Refused(f"llama.cpp runs GGUF files only, which {target.info.name} is not")
        if target.model.stateful:
            raise Refused(f"{self.name} needs a cache that can discard tokens, which {target.info.name} does not have")
        return Runs(name, self, target, entry.threads)

    def flags(self, cache_type: str) -> list[str]:
        """Command-line options of this program."""
        return []

    @abstractmethod
    def length(self, tokens: int) -> int:
        """The value of -n with which it writes at least so many tokens."""

    @abstractmethod
    def counted(self, counts: Counts) -> Stats:
        """The counters of the forwards after the prefill."""

    def first_token(self, prefill: float, seconds: float, stats: Stats) -> float:
        """Seconds from the start to the first token; by default the prefill yields it."""
        return prefill


@dataclass(frozen=True)
class Lookahead(Program):
    """`llama-lookahead`, with its fixed window, n-gram size and pool.

    The prefill yields the first token, which `n_predict` does not count; every other forward yields one token beside
    those of `n_accept`.
    """

    name: ClassVar[str] = "llama-lookahead"
    counters: ClassVar[tuple[str, ...]] = (*Program.counters, "W", "N")

    def length(self, tokens: int) -> int:
        return max(0, tokens - 2)  # it stops after -n tokens and does not count the first; -1 means no limit

    def counted(self, counts: Counts) -> Stats:
        steps, depth = counts["n_predict"] - counts["n_accept"], counts["N"] - 1
        # Root and window have W * depth nodes, an n-gram has depth; rounded up, as one forward is counted elsewhere.
        nodes = depth * math.ceil((counts["read"] - counts["prompt"]) / depth)
        return _stats("lookahead", 2, steps, nodes, nodes - steps * counts["W"] * depth, counts["n_accept"])


@dataclass(frozen=True)
class Lookup(Program):
    """`llama-lookup`: continuations of n-grams of the prompt and the text.

    The prefill yields the first token of `n_predict`; every other forward yields one beside those of `n_accept`.
    """

    name: ClassVar[str] = "llama-lookup"
    counters: ClassVar[tuple[str, ...]] = (*Program.counters, "n_drafted", "t_draft")
    draft_max: int = 0  # tokens drafted for a step; 0 for llama.cpp's own

    def flags(self, cache_type: str) -> list[str]:
        return ["--spec-draft-n-max", str(self.draft_max)] if self.draft_max else []

    def length(self, tokens: int) -> int:
        return max(1, tokens - 1)  # it stops after -n tokens; 0 means no limit

    def counted(self, counts: Counts) -> Stats:
        steps, drafted = counts["n_predict"] - counts["n_accept"] - 1, counts["n_drafted"]
        return _stats("lookup", 2, steps, steps + drafted, drafted, counts["n_accept"])


@dataclass(frozen=True)
class SpeculativeSimple(Program):
    """`llama-speculative-simple`, with a draft model or one of its n-gram types.

    The prefill yields no token; every forward yields one beside those of `n_accept`. The time to the first token is
    that of the prefill plus the mean time of a step.
    """

    name: ClassVar[str] = "llama-speculative-simple"
    counters: ClassVar[tuple[str, ...]] = (*Program.counters, "n_drafted")
    draft: str = where("a GGUF file of a draft model", default="")
    type: str = ""  # of --spec-type
    draft_max: int = 0  # tokens drafted for a step; 0 for llama.cpp's own
    match: int = 0  # tokens that an n-gram type looks up; 0 for llama.cpp's own

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.draft) == bool(self.type):
            raise BadParameter(f"{self.name} drafts with a model or with n-grams: give either draft=... or type=...")
        if self.draft and not Path(self.draft).is_file():
            raise BadParameter(f"there is no file {self.draft!r}; give a GGUF file as the draft")
        if self.type and self.type not in (known := _types(executable(self.path))):
            raise BadParameter(f"{self.name} has no n-gram type {self.type!r}; there are {', '.join(known)}")
        if (self.match and not self.type) or (self.type == "ngram-cache" and (self.match or self.draft_max)):
            what = self.type or "a draft model"
            raise BadParameter(f"{self.name} has no such option for {what}: leave match and draft_max out")

    @property
    def label(self) -> str:
        given = {"draft": Path(self.draft).stem, "type": self.type, "draft_max": self.draft_max, "match": self.match}
        return f"{self.name}({', '.join(f'{key}={value}' for key, value in given.items() if value)})"

    def enter(self, name: str, entry: Entry) -> Contender:
        contender = super().enter(name, entry)
        if self.draft:
            from leapahead.models.llama_cpp.context import Model
            from leapahead.models.llama_cpp.options import LlamaCppOptions

            size, own = Model(self.draft, LlamaCppOptions()).vocab_size, entry.loaded.target.info.vocab_size
            if size != own:
                raise Refused(f"the draft model has a vocabulary of {size} tokens and the target one of {own}")
        return contender

    def flags(self, cache_type: str) -> list[str]:
        if self.draft:
            given = ["--spec-type", "draft-simple", "-md", self.draft, "-ctkd", cache_type, "-ctvd", cache_type]
            return [*given, *(["--spec-draft-n-max", str(self.draft_max)] if self.draft_max else [])]
        given, mod = ["--spec-type", self.type], self.type == "ngram-mod"
        if self.match:
            given += [f"--spec-{self.type}-{'n-match' if mod else 'size-n'}", str(self.match)]
        if self.draft_max:
            given += [f"--spec-{self.type}-{'n-max' if mod else 'size-m'}", str(self.draft_max)]
            if mod:  # it drops shorter drafts, by default all under 48 tokens
                given += ["--spec-ngram-mod-n-min", "1"]
        return given

    def length(self, tokens: int) -> int:
        return tokens - 1  # it stops after -n tokens

    def counted(self, counts: Counts) -> Stats:
        steps, drafted = counts["n_predict"] - counts["n_accept"], counts["n_drafted"]
        return _stats(self.type or "draft", 1, steps, steps + drafted, drafted, counts["n_accept"])

    def first_token(self, prefill: float, seconds: float, stats: Stats) -> float:
        return prefill + seconds / stats.steps


def _stats(source: str, prefill: int, steps: int, nodes: int, drafted: int, accepted: int) -> Stats:
    return Stats(
        prefill_forwards=prefill,
        steps=steps,
        committed=steps + accepted,
        nodes=nodes,
        drafted=nodes - steps,
        accepted=accepted,
        drafted_by=Tally({source: drafted}),
        accepted_by=Tally({source: accepted}),
    )


class Runs(Contender):
    """Runs a process for each prompt, greedily, with the target's file, threads, context and cache types."""

    def __init__(self, name: str, program: Program, target: LlamaCppTarget, threads: int | None) -> None:
        import llama_cpp as c

        from leapahead.core.processor import physical_cores
        from leapahead.models.llama_cpp.context import STEPS
        from leapahead.models.llama_cpp.tokenizer import GgufTokenizer

        self.name, self._program, self._target = name, program, target
        self._tokenizer = GgufTokenizer(target.model)
        self._to_piece: Callable[..., int] = c.llama_token_to_piece
        cache_type = "f32" if target.model.precision == STEPS["f32"] else "f16"  # as `Context` chooses
        some = str(threads or physical_cores())
        self._flags = ["-m", str(Path(target.model.path).expanduser()), "-t", some, "-tb", some]
        self._flags += ["-ctk", cache_type, "-ctv", cache_type, "--swa-full", "-fit", "off", "--no-escape"]
        self._flags += ["-fa", "off"] if cache_type == "f32" else []
        self._flags += [] if c.llama_supports_gpu_offload() else ["-dev", "none"]
        # Greedy; otherwise sampling settings in the file would apply.
        self._flags += ["--samplers", "top_k", "--top-k", "1", "--mirostat", "0"]
        self._flags += program.flags(cache_type)
        letter = self._tokenizer.encode("x", add_special_tokens=False)
        self._spaced = self._pieces(letter) == b" x"  # which `decode` strips

    def refusal(self, prompts: Sequence[list[int]], setting: Setting) -> str | None:
        if setting.temperature:
            return "its random numbers differ, so sampled texts cannot be compared"
        if setting.batch > 1:
            return "it decodes one text at a time"
        if set(setting.eos_token_ids) != set(self._tokenizer.end_token_ids):
            return f"it ends texts only at llama.cpp's own end tokens, {self._tokenizer.end_token_ids}"
        if wrong := sum(self._given(prompt) is None for prompt in prompts):
            return f"it takes text, and reads that of {wrong} of {len(prompts)} prompts as other tokens"
        return None

    def run(self, prompts: Sequence[list[int]], setting: Setting) -> Pass:
        done = Pass([], 0.0)
        for prompt in prompts:
            done.add(self._one(prompt, setting))
        return done

    def _one(self, prompt: list[int], setting: Setting) -> Pass:
        program, context = self._program, self._target.context
        room = len(prompt) + setting.max_new_tokens + ROOM
        flags = [*self._flags, "-n", str(program.length(setting.max_new_tokens))]
        flags += ["-c", str(max(context.n_ctx, room)), "-b", str(max(context.n_batch, len(prompt)))]
        with tempfile.TemporaryDirectory(prefix="leapahead-") as folder:
            file = Path(folder) / "prompt"  # not -f, which strips a trailing newline
            file.write_bytes(self._given(prompt) or b"")
            command = [executable(program.path), *flags, "-bf", str(file)]
            for _ in range(TRIES):
                output, log, memory = run(command, Path(folder))
                counts = _counts(log)
                missing = next((key for key in program.counters if key not in counts), None)
                if missing is None and output.endswith(END):
                    break
            else:
                what = f"its counter {missing}" if missing else "its whole text"
                raise LeapaheadError(f"{program.path} did not print {what} in {TRIES} attempts: {last_line(log)}")
        made = self._made(output, prompt)
        read, prefill = _clock(program.path, "encoded", log)
        _, seconds = _clock(program.path, "decoded", log)
        if made is None or read != len(prompt):
            raise LeapaheadError(f"{program.path} did not read the {len(prompt)} tokens of the prompt, but others")
        stats = program.counted({**counts, "prompt": read})
        text = Text([], program.first_token(prefill, seconds, stats), stats, stats.committed, self._text(made))
        return Pass([text], seconds, prefill, memory=memory)

    def _given(self, prompt: list[int]) -> bytes | None:
        """A text that the program reads as these tokens; None where there is none."""
        rest = self._pieces(prompt[1:])  # the program may put the first token before it, and a space
        for text in (self._pieces(prompt), rest, rest.removeprefix(b" ")):
            try:
                if self._tokenizer.encode(text.decode()) == prompt:
                    return text
            except UnicodeDecodeError:
                continue
        return None

    def _made(self, output: bytes, prompt: list[int]) -> bytes | None:
        """The output after the prompt; None where stdout does not begin with the prompt."""
        begin = b"\n\n" + self._pieces(prompt).replace(b"\0", b"")  # printed as C strings
        return output[len(begin) : -len(END)] if output.startswith(begin) else None

    def _text(self, made: bytes) -> str:
        """The output as the target's tokenizer decodes it."""
        for colour in COLOURS:
            made = made.replace(colour, b"")
        for end in filter(None, (self._pieces([token]) for token in self._tokenizer.end_token_ids)):
            made = made.partition(end)[0]  # an accepted draft may continue after it
        text = made.decode("utf-8", "replace")
        tokens = self._tokenizer.encode(text.removeprefix(" ") if self._spaced else text, add_special_tokens=False)
        return self._tokenizer.decode(tokens, skip_special_tokens=True)

    def _pieces(self, tokens: Sequence[int]) -> bytes:
        """The bytes of each token, special tokens included, without the clean-up of `decode`."""
        found = []
        for token in tokens:
            size = self._to_piece(self._target.model.vocab, token, ctypes.create_string_buffer(0), 0, 0, True)
            buffer = ctypes.create_string_buffer(abs(size) + 1)
            self._to_piece(self._target.model.vocab, token, buffer, abs(size), 0, True)
            found.append(buffer.raw[: abs(size)])
        return b"".join(found)


def _clock(path: str, what: str, log: str) -> tuple[int, float]:
    """Tokens and seconds; the seconds from the printed speed, which has more digits."""
    found = re.search(rf"{what} +(\d+) tokens in +([\d.]+) seconds, speed: +(\S+) t/s", log)
    if found is None:
        raise LeapaheadError(f"{path} does not print how long it {what}: {last_line(log)}")
    tokens, seconds, speed = int(found[1]), float(found[2]), float(found[3])
    return tokens, max(tokens / speed if math.isfinite(speed) and speed > 0 else seconds, 1e-6)


def _counts(log: str) -> Counts:
    """The counters in a program's log."""
    found = {key: int(value) for key, value in re.findall(r"\b(\w+) += +(\d+)", log)}
    read = re.search(r"prompt eval time = .*? / +(\d+) tokens", log)
    return found | ({"read": int(read[1])} if read else {})


@cache
def _version(path: str) -> str:
    found = re.search(r"^version: (.+)$", output_of(path, "--version"), re.MULTILINE)
    if found is None:
        raise BadParameter(
            f"{path} is not a program of llama.cpp: its --version prints no version; give the path of one"
        )
    return str(found[1]).strip()


@cache
def _types(path: str) -> tuple[str, ...]:
    """The n-gram types that the program supports."""
    found = re.search(r"^--spec-type +(\S+)", output_of(path, "--help"), re.MULTILINE)
    return tuple(each for each in re.split(r"[^\w-]+", found[1]) if each.startswith("ngram")) if found else ()
