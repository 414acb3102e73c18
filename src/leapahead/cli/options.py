"""Options that several commands share, and how they become arguments of library calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import click

from leapahead import drafters
from leapahead.cli.command import Decorated, drafter_names, option
from leapahead.cli.engine_options import ENGINE, GGUF_GROUP, MODEL_GROUP, OF_TRANSFORMERS, SEVERAL_DEVICES
from leapahead.cli.engine_options import Option as Option
from leapahead.cli.text_input import utf8_only
from leapahead.cli.typed import HomePath, value_of
from leapahead.core.errors import BadParameter
from leapahead.core.parameters import MOST_BATCH
from leapahead.inputs import Options
from leapahead.models.loading import ENGINE_OPTIONS, ENGINES

SHORTHANDS = ("window", "ngram", "guesses", "preset", "draft", "head")  # drafter options with a flag of their own
DRAFTER_GROUP, TEXT_GROUP = "Drafter options", "Text options"
INPUT_GROUP = "Input options"
EXISTING_FILE = HomePath(exists=True, dir_okay=False, path_type=Path)
FILE_OF_PROMPTS = (
    "JSON lines (.jsonl) with one of the fields prompt, question, turns and messages (answers at the end are left "
    "out), or a text file with a prompt on each line"
)


# Of a command that completes one prompt, beside the argument PROMPT: see `text_input.prompt_text`.
INPUT: tuple[Option, ...] = (
    option(
        "-f",
        "--file",
        type=HomePath(exists=True, dir_okay=False, allow_dash=True, path_type=Path),
        metavar="FILE",
        group=INPUT_GROUP,
        help="Read the prompt from a file; `-` is standard input.",
    ),
    option(
        "--prediction",
        type=EXISTING_FILE,
        metavar="FILE",
        group=INPUT_GROUP,
        help="A file with approximately the expected text, for the drafters auto and prediction.",
    ),
    option(
        "--chat",
        "as_chat",
        is_flag=True,
        group=INPUT_GROUP,
        help="Send the prompt as a user's message, by the chat template.",
    ),
)


def _model_name(what: str) -> Option:
    """The option `--model`; `what` is its help."""
    shown = "the bundled model"
    return option("-m", "--model", metavar="MODEL", group=MODEL_GROUP, show_default=shown, help=what)


MODEL_NAME = _model_name("Hub name or folder of a Transformers model, an OpenVINO folder, a GGUF file, or `bundled`.")
TRUST_REMOTE_CODE: Option = option(
    "--trust-remote-code", is_flag=True, group=MODEL_GROUP, help="Run Python code that comes with the model."
)
EXACT: Option = option(
    "--exact",
    is_flag=True,
    group=MODEL_GROUP,
    help="Compute the same bits whatever is drafted or decoded together, so that no rounding changes a text; slower.",
)
PLACE: tuple[Option, ...] = (
    option(
        "--dtype",
        default="auto",
        metavar="DTYPE",
        group=MODEL_GROUP,
        help="float32, bfloat16, float16, or auto: the type that the model was saved in.",
    ),
    option(
        "--device",
        default="auto",
        metavar="DEVICE",
        group=MODEL_GROUP,
        help="cpu, cuda, cuda:1, mps, xpu, auto: an accelerator if there is one; or balanced: the layers on all GPUs.",
    ),
)
LOADING: tuple[Option, ...] = (
    option(
        "--engine",
        type=click.Choice(ENGINES),
        default="auto",
        group=MODEL_GROUP,
        help="What computes: OpenVINO for its own folders, llama.cpp for GGUF files, Transformers for all others; "
        "`openvino` takes those too, and converts them once.",
    ),
    *PLACE,
    *SEVERAL_DEVICES,
    TRUST_REMOTE_CODE,
    EXACT,
    option(
        "--cache-tokens",
        type=int,
        metavar="N",
        group=MODEL_GROUP,
        show_default="by the free memory",
        help="Greatest number of tokens in the KV cache, all texts together; of a GGUF file, --ctx-size says it.",
    ),
    *OF_TRANSFORMERS,
    option(
        "-c",
        "--ctx-size",
        "n_ctx",
        type=int,
        metavar="N",
        group=GGUF_GROUP,
        show_default="the length that the model was trained with, at most 4096",
        help="Length of the context in tokens; 0 is the length that the model was trained with.",
    ),
)
THREADS: Option = option(
    "--threads",
    "n_threads",
    type=int,
    metavar="N",
    group=MODEL_GROUP,
    show_default="one per core",
    help="CPU threads of llama.cpp, for forwards of few tokens, and of OpenVINO.",
)
MODEL: tuple[Option, ...] = (MODEL_NAME, *LOADING, THREADS, *ENGINE)
# Of commands for models of Transformers only, which have them in one process.
TRANSFORMERS_NAME = _model_name("Hub name or folder of a Transformers model, or `bundled`.")
TRANSFORMERS_MODEL: tuple[Option, ...] = (TRANSFORMERS_NAME, *PLACE, TRUST_REMOTE_CODE, *OF_TRANSFORMERS)


def _other_options(*names: str) -> Option:
    return option(
        *names,
        "options",
        multiple=True,
        metavar="KEY=VALUE",
        group=DRAFTER_GROUP,
        help="Any other option of the drafter, see `leapahead drafters`. May be repeated.",
    )


_OWN: tuple[Option, ...] = (
    option("-W", "--window", type=int, metavar="W", group=DRAFTER_GROUP, help="Window of lookahead."),
    option(
        "-N", "--ngram", type=int, metavar="N", group=DRAFTER_GROUP, help="N-gram size of lookahead, its key included."
    ),
    option("-G", "--guesses", type=int, metavar="G", group=DRAFTER_GROUP, help="Guesses per step of lookahead."),
    option(
        "--preset",
        metavar="NAME",
        group=DRAFTER_GROUP,
        help="W, N and G of lookahead by name: code, text, creative, 7b, 13b or 34b.",
    ),
    option(
        "--draft",
        metavar="MODEL",
        group=DRAFTER_GROUP,
        help="A smaller model that drafts, with the tokenizer of the target; several are separated by commas. "
        "`bundled` is the draft model of the bundled one.",
    ),
    option(
        "--head",
        metavar="FOLDER",
        group=DRAFTER_GROUP,
        help="Folder of a head that was trained for this model (EAGLE-3, Medusa, Hydra, DFlash and others), see "
        "`leapahead train-head`; several are separated by commas. `mtp`: the MTP modules in its own checkpoint. "
        "`bundled`: the bundled model's head.",
    ),
)
DRAFTER_OPTIONS: tuple[Option, ...] = (*_OWN, _other_options("-o", "--option"))

DRAFTER_NAME: Option = option(
    "-d",
    "--drafter",
    default="auto",
    metavar="DRAFTER",
    shell_complete=drafter_names,
    group=DRAFTER_GROUP,
    help="What drafts, see `leapahead drafters`.",
)
DRAFTER: tuple[Option, ...] = (DRAFTER_NAME, *DRAFTER_OPTIONS)
DRAFTER_BESIDE_OUTPUT = (DRAFTER_NAME, *_OWN, _other_options("--option"))  # where -o names a file

TEMPERATURE: Option = option(
    "-t",
    "--temperature",
    type=float,
    default=0.0,
    group=TEXT_GROUP,
    help="0 is greedy decoding; above 0, tokens are sampled.",
)
IGNORE_EOS: Option = option(
    "--ignore-eos", is_flag=True, group=TEXT_GROUP, help="Continue after the model's end-of-text token."
)
SAMPLING: tuple[Option, ...] = (
    TEMPERATURE,
    option("--top-k", type=int, group=TEXT_GROUP, show_default="all", help="Sample from the k likeliest tokens."),
    option(
        "--top-p",
        type=float,
        group=TEXT_GROUP,
        show_default="1",
        help="Sample from the likeliest tokens whose probabilities add up to p.",
    ),
    option(
        "--min-p",
        type=float,
        group=TEXT_GROUP,
        show_default="0",
        help="Sample from the tokens that are at least p times as likely as the likeliest.",
    ),
    option("--seed", type=int, group=TEXT_GROUP, show_default="random", help="The same seed gives the same text."),
)
TEXT: tuple[Option, ...] = (
    option(
        "-n", "--max-new-tokens", type=int, default=128, group=TEXT_GROUP, help="Greatest length of the text in tokens."
    ),
    option(
        "--min-new-tokens",
        type=int,
        group=TEXT_GROUP,
        show_default="0",
        help="No end of text before so many tokens.",
    ),
    *SAMPLING,
    option(
        "--repetition-penalty",
        type=float,
        group=TEXT_GROUP,
        show_default="1",
        help="Above 1, tokens that are in the prompt or the text become less likely.",
    ),
    option(
        "--presence-penalty",
        type=float,
        group=TEXT_GROUP,
        show_default="0",
        help="Subtracted from the logits of tokens that are in the text so far.",
    ),
    option(
        "--frequency-penalty",
        type=float,
        group=TEXT_GROUP,
        show_default="0",
        help="Subtracted as often as the token is in the text so far.",
    ),
    option(
        "--bad-word",
        "bad_words",
        callback=utf8_only,
        multiple=True,
        metavar="TEXT",
        group=TEXT_GROUP,
        help="Text that must not be written. May be repeated.",
    ),
    option(
        "--stop",
        callback=utf8_only,
        multiple=True,
        metavar="TEXT",
        group=TEXT_GROUP,
        help="End before this text. May be repeated.",
    ),
    option(
        "--stop-token-id",
        "stop_token_ids",
        type=int,
        multiple=True,
        metavar="ID",
        group=TEXT_GROUP,
        help="End after this token. May be repeated.",
    ),
    IGNORE_EOS,
)

TEXT_NAMES = (
    *("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "bad_words", "min_new_tokens", "seed", "stop", "stop_token_ids", "ignore_eos"),
)


def batch_option(what: str, *names: str, **attributes: Any) -> Option:
    """The option `--batch`.

    Args:
        what: its help.
        names, attributes: more of `option`.
    """
    limits = click.IntRange(1, MOST_BATCH)
    return option("--batch", *names, type=limits, metavar="N", argument="max_batch", help=what, **attributes)


def data_option(what: str, **attributes: Any) -> Option:
    """The option `--data`, which `bench.tasks.read` is given.

    Args:
        what: its help.
        attributes: more of `option`.
    """
    return option(
        "--data",
        "--prompts",
        "data",
        type=HomePath(path_type=Path),
        metavar="PATH",
        show_default="a small built-in set of prompts",
        help=what,
        **attributes,
    )


def all_of(*groups: Sequence[Option]) -> Callable[[Decorated], Decorated]:
    """A decorator that adds groups of options to a command, in order."""

    def add(command: Decorated) -> Decorated:
        for group in reversed(groups):
            for add_option in reversed(group):
                add_option(command)
        return command

    return add


def model_arguments(values: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `loading.load` and `LLM`, removed from a command's values; an engine's only where given."""
    return {"model": values.pop("model"), **loading_arguments(values)}


def loading_arguments(values: dict[str, Any]) -> dict[str, Any]:
    """The same without the model."""
    common = ("engine", "dtype", "device", "trust_remote_code", "exact")
    found = {name: values.pop(name) for name in common if name in values}
    backend = {name: values.pop(name) for name in (*ENGINE_OPTIONS, "cache_tokens") if name in values}
    if backend.get("flash_attn") is not None:
        backend["flash_attn"] = backend["flash_attn"] == "on"
    return {**found, **{name: value for name, value in backend.items() if value is not None}}


def text_arguments(values: dict[str, Any]) -> Options:
    """The arguments of `LLM.generate` that were given, removed from a command's values."""
    given = {name: values.pop(name) for name in TEXT_NAMES}
    return cast(Options, {name: value for name, value in given.items() if value not in (None, ())})


def drafter_arguments(values: dict[str, Any], names: Sequence[str], typed_as: str = "--option ") -> dict[str, Any]:
    """Options for the drafters `names`, removed from a command's values; each value has the type of its annotation.

    Args:
        typed_as: what stands before KEY=VALUE on the command line, for messages.

    Raises:
        BadParameter: no such drafter, a value of `--option` that is not KEY=VALUE or not of the option's type, or an
            option that is given twice.
    """
    given = {name: value for name in SHORTHANDS if (value := values.pop(name)) is not None}
    typed = {name: f"--{name} {value}" for name, value in given.items()}
    known: dict[str, Any] = {}
    for name in names:
        known = {**drafters.options(drafters.load(name)), **known}
    for pair in values.pop("options"):
        key, equals, text = pair.partition("=")
        key = key.strip().replace("-", "_")
        if not equals:
            raise BadParameter(f"{typed_as}{pair} is not possible: it must be KEY=VALUE")
        if key in given:
            raise BadParameter(f"{typed[key]} and {typed_as}{pair} are the same option; leave one out")
        typed[key] = f"{typed_as}{pair}"
        given[key] = value_of(typed[key], text, known[key].annotation) if key in known else text
    return given
