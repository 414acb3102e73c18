"""Command-line options that several commands share, and how they become arguments."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from leapahead import drafters
from leapahead.core.errors import BadParameter
from leapahead.models.loading import LLAMA_CPP_OPTIONS

Command = TypeVar("Command", bound=Callable[..., Any])
Option = Callable[[Any], Any]  # a click decorator

SHORTHANDS = ("window", "ngram", "guesses", "preset", "draft")  # drafter options with a flag of their own

MODEL: tuple[Option, ...] = (
    click.option(
        "-m", "--model", metavar="M", help="Hub name or folder of a model, or a GGUF file.  [default: the bundled one]"
    ),
    click.option("--dtype", default="auto", show_default=True, help="float32, bfloat16, float16, or the model's own."),
    click.option("--device", default="auto", show_default=True, help="cpu, cuda, mps, or the best there is."),
    click.option("--trust-remote-code", is_flag=True, help="Run Python code that comes with the model."),
    click.option("-c", "--ctx-size", "n_ctx", type=int, metavar="N", help="GGUF: tokens of context; 0: the model's."),
    click.option("--threads", "n_threads", type=int, metavar="N", help="GGUF: CPU threads.  [default: one a core]"),
    click.option("--threads-batch", "n_threads_batch", type=int, metavar="N", help="GGUF: the same, for many tokens."),
    click.option("-ngl", "--gpu-layers", "n_gpu_layers", type=int, metavar="N", help="GGUF: layers on a GPU; -1: all."),
    click.option("--no-mmap", "use_mmap", flag_value=False, default=None, help="GGUF: read the file, do not map it."),
    click.option("--mlock", "use_mlock", is_flag=True, default=None, help="GGUF: keep the model in memory."),
    click.option("-fa", "--flash-attn", type=click.Choice(["on", "off"]), help="GGUF: flash attention."),
    click.option(
        "-ctk", "--cache-type-k", "type_k", metavar="T", help="GGUF: of the cached keys: f32, f16, bf16, q8_0."
    ),
    click.option("-ctv", "--cache-type-v", "type_v", metavar="T", help="GGUF: the same of the values."),
)

DRAFTER_OPTIONS: tuple[Option, ...] = (
    click.option("-W", "--window", type=int, metavar="W", help="Lookahead's window: positions it looks ahead."),
    click.option("-N", "--ngram", type=int, metavar="N", help="Lookahead's n-gram length, key included."),
    click.option("-G", "--guesses", type=int, metavar="G", help="Lookahead's guesses per step."),
    click.option("--preset", metavar="NAME", help="Lookahead's (W, N, G) by name: code, text, creative, 7b, 13b, 34b."),
    click.option(
        "--draft", metavar="M", help="A smaller model that drafts, with the same tokenizer; several divided by commas."
    ),
    click.option(
        "-o",
        "--option",
        "options",
        multiple=True,
        metavar="KEY=VALUE",
        help="Any other option of the drafter, see `leapahead drafters`. May be repeated.",
    ),
)

DRAFTER: tuple[Option, ...] = (
    click.option("-d", "--drafter", default="auto", show_default=True, metavar="D", help="What guesses ahead."),
    *DRAFTER_OPTIONS,
)

TEXT: tuple[Option, ...] = (
    click.option("--max-new-tokens", type=int, default=128, show_default=True, help="Length limit of the text."),
    click.option("-t", "--temperature", type=float, default=0.0, show_default=True, help="0 is greedy."),
    click.option("--top-k", type=int, help="Sample from the k likeliest tokens."),
    click.option("--top-p", type=float, help="Sample from the likeliest tokens of mass p."),
    click.option("--min-p", type=float, help="Sample from tokens at least p times as likely as the likeliest."),
    click.option("--repetition-penalty", type=float, help="Above 1 discourages tokens seen before."),
    click.option("--presence-penalty", type=float, help="Subtracted from tokens of the output."),
    click.option("--frequency-penalty", type=float, help="The same, for each time the token was used."),
    click.option("--bad-word", "bad_words", multiple=True, metavar="TEXT", help="Never write this. May be repeated."),
    click.option("--min-new-tokens", type=int, help="No end of text before so many tokens."),
    click.option("--seed", type=int, help="The same seed gives the same text.  [default: random]"),
    click.option("--stop", multiple=True, metavar="TEXT", help="End the text before this. May be repeated."),
    click.option("--stop-token-id", "stop_token_ids", type=int, multiple=True, help="End at this. May be repeated."),
    click.option("--ignore-eos", is_flag=True, help="Go on after the model's end of text."),
)

TEXT_NAMES = (
    *("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "bad_words", "min_new_tokens", "seed", "stop", "stop_token_ids", "ignore_eos"),
)


def all_of(*groups: Sequence[Option]) -> Callable[[Command], Command]:
    """Puts groups of options on a command, in order."""

    def put(command: Command) -> Command:
        for group in reversed(groups):
            for option in reversed(group):
                option(command)  # puts itself on the function
        return command

    return put


def model_arguments(values: dict[str, Any]) -> dict[str, Any]:
    """Of `targets.load` and `LLM`, taken out of a command's values: options of a backend only where they were given."""
    found = {name: values.pop(name) for name in ("model", "dtype", "device", "trust_remote_code")}
    backend = {name: values.pop(name) for name in LLAMA_CPP_OPTIONS if name in values}
    if backend["flash_attn"] is not None:
        backend["flash_attn"] = backend["flash_attn"] == "on"
    return {**found, **{name: value for name, value in backend.items() if value is not None}}


def text_arguments(values: dict[str, Any]) -> dict[str, Any]:
    """Of `LLM.generate`: what was given, of a command's values."""
    given = {name: values.pop(name) for name in TEXT_NAMES}
    return {name: value for name, value in given.items() if value not in (None, ())}


def drafter_arguments(values: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Options for the drafters `names`, taken out of a command's values; each value in the type that it needs."""
    given = {name: value for name in SHORTHANDS if (value := values.pop(name)) is not None}
    known: dict[str, Any] = {}
    for name in names:
        known = {**drafters.options(drafters.load(name)), **known}
    for pair in values.pop("options"):
        key, equals, text = pair.partition("=")
        key = key.strip().replace("-", "_")
        if not equals:
            raise BadParameter(f"-o {pair} is not possible: it must be KEY=VALUE")
        given[key] = _value(key, text, known[key].annotation) if key in known else text
    return given


def prompt_text(prompt: str | None, file: Path | None) -> str:
    """The prompt as given, from a file, or from standard input for "-"."""
    if (prompt is None) == (file is None):
        raise click.UsageError("give either a prompt (or - for standard input) or --file")
    if file is None:
        assert prompt is not None
        return sys.stdin.read() if prompt == "-" else prompt
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise BadParameter(f"{file} is not UTF-8 text") from None


def _value(key: str, text: str, annotation: Any) -> Any:
    """`text` in the type that the drafter's signature names."""
    readers: list[tuple[str, Callable[[str], Any]]] = [("int", int), ("float", float), ("bool", _bool), ("str", str)]
    named = set(re.findall(r"\w+", str(annotation))) & {kind for kind, _ in readers}
    for kind, read in readers:
        if kind in named or not named:
            try:
                return read(text)
            except ValueError:
                continue
    raise BadParameter(f"-o {key}={text} is not possible: {key} is {annotation}")


def _bool(text: str) -> bool:
    word = text.lower()
    if word not in ("true", "false", "yes", "no", "on", "off"):
        raise ValueError(text)
    return word in ("true", "yes", "on")
