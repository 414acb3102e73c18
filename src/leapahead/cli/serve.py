"""`leapahead serve`: an OpenAI-compatible server. What it needs beside the library is imported when it starts."""

from __future__ import annotations

import ipaddress
import os
import signal
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from types import FrameType
from typing import Any

import click

from leapahead.api import LLM
from leapahead.chat import REASONING_FORMATS, TOOL_FORMATS
from leapahead.cli.cache import DRAFTER_CACHE
from leapahead.cli.command import Command, file_names, option, say
from leapahead.cli.generate import open_llm
from leapahead.cli.options import DRAFTER, EXISTING_FILE, MODEL, all_of
from leapahead.cli.typed import Finite
from leapahead.core.errors import BadParameter, needing
from leapahead.core.parameters import MOST_BATCH
from leapahead.models.warm_up import WarmsUp

SERVER, LIMITS, ACCESS = "Server options", "Limits", "Access options"
PACKAGES = ("fastapi", "starlette", "uvicorn", "pydantic", "pydantic_core", "prometheus_client", "httptools")
NATIVE_SECONDS = 5.0  # that SIGTERM waits for the end of a native call in the load of a model; Docker waits 10 in all
SIGTERM_ENDED = "ended by SIGTERM, before the server was ready"
DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # of a generation_config that are taken


def _parser(name: str, what: str, formats: Iterable[str]) -> Any:
    return option(
        name,
        type=click.Choice([*formats, "none"]),
        group=SERVER,
        show_default="found by the chat template",
        help=f"Format of {what} in the model's texts. With `none`, all of a text is content.",
    )


ADDRESS = (
    option("--host", default="127.0.0.1", metavar="HOST", group=SERVER, help="Address to listen at."),
    option(
        "--port",
        type=click.IntRange(0, 65535),
        default=8000,
        metavar="N",
        group=SERVER,
        help="Port to listen at; 0 takes any free one.",
    ),
    option(
        "--served-model-name",
        "names",
        multiple=True,
        metavar="NAME",
        group=SERVER,
        show_default="the model as given",
        help="Name of the model in requests. May be repeated.",
    ),
    option(
        "--max-batch",
        type=click.IntRange(1, MOST_BATCH),
        default=8,
        metavar="N",
        group=SERVER,
        help="Greatest number of texts decoded together; further ones wait.",
    ),
    option(
        "--prefill-chunk",
        type=click.IntRange(min=1),
        metavar="N",
        group=SERVER,
        show_default="as many as take about four plain steps",
        help="Greatest number of prompt tokens that are read between two steps of running requests.",
    ),
    option(
        "--generation-config",
        is_flag=True,
        group=SERVER,
        help="Take sampling parameters that a request leaves out from the model's generation_config, not OpenAI's.",
    ),
    _parser("--tool-call-parser", "tool calls", TOOL_FORMATS),
    _parser("--reasoning-parser", "reasoning", REASONING_FORMATS),
    option("--log-prompts", is_flag=True, group=SERVER, help="Let the log contain prompts and texts."),
)
WHO = (
    option(
        "--api-key",
        "api_keys",
        multiple=True,
        metavar="KEY",
        group=ACCESS,
        help="A key that requests must have. May be repeated. Other users of the machine can see it here; "
        "LEAPAHEAD_API_KEY and --api-key-file hide it.",
    ),
    option(
        "--api-key-file",
        type=EXISTING_FILE,
        metavar="FILE",
        group=ACCESS,
        help="A file with a key in each line; lines that begin with # are comments.",
    ),
    option("--no-auth", is_flag=True, group=ACCESS, help="Listen at other addresses than loopback without any key."),
    option(
        "--allowed-origin",
        "cors",
        multiple=True,
        metavar="ORIGIN",
        group=ACCESS,
        help="An origin whose pages may call the server from a browser; `*` is all. May be repeated.",
    ),
    option(
        "--shared-drafter-cache",
        is_flag=True,
        group=ACCESS,
        help="Let drafts for one key come from texts of other keys, too.",
    ),
)


def _count(name: str, help_text: str, default: int | None = None, least: int = 1) -> Any:
    kind = click.IntRange(min=least)
    return option(name, type=kind, default=default, metavar="N", group=LIMITS, help=help_text)


def _seconds(name: str, help_text: str, default: float | None = None, zero: bool = False) -> Any:
    kind = Finite(min=0.0, min_open=not zero)
    return option(name, type=kind, default=default, metavar="SECONDS", group=LIMITS, help=help_text)


BOUNDS = (
    _count("--max-queue", "Greatest number of texts that wait to be decoded; more are answered with 429.", 256, 0),
    _count("--max-samples", "Greatest `n`, the number of texts of a prompt.", 16),
    _count("--max-prompts", "Greatest number of prompts of a request.", 64),
    _count("--max-prompt-tokens", "Greatest length of a prompt in tokens; by default the context's."),
    _count("--max-tokens", "Greatest length of a text in tokens; by default the context's."),
    _count(
        "--default-max-tokens",
        "Length in tokens of answers in chats where a request names none; by default the context's.",
    ),
    _count("--max-logprobs", "Greatest number of alternatives that are reported for each token.", 20, 0),
    _count("--max-stops", "Greatest number of stop strings of a request.", 16, 0),
    _count("--max-body-bytes", "Greatest size of a request's body in bytes.", 4 * 2**20),
    _seconds("--header-seconds", "Longest time for the headers of a request.", 10.0),
    _seconds("--body-seconds", "Longest time for the body of a request.", 60.0),
    _seconds("--send-seconds", "A client that reads nothing of its answer for so long is cancelled.", 60.0),
    _seconds("--request-seconds", "Longest time for a request, the queue included; by default not limited."),
    _seconds("--shutdown-seconds", "How long running requests may go on after SIGTERM.", 30.0, zero=True),
)
NAMES = {
    "max_queue": "queue",
    "max_samples": "samples",
    "max_prompts": "prompts",
    "max_logprobs": "logprobs",
    "max_stops": "stops",
}
NAMES |= {"max_body_bytes": "body_bytes", "max_prompt_tokens": "prompt_tokens"}
OF_LIMITS = (
    *(
        "max_queue",
        "max_samples",
        "max_prompts",
        "max_prompt_tokens",
        "max_tokens",
        "default_max_tokens",
        "max_logprobs",
    ),
    *(
        "max_stops",
        "max_body_bytes",
        "header_seconds",
        "body_seconds",
        "send_seconds",
        "request_seconds",
        "shutdown_seconds",
    ),
)


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Within the block, SIGTERM ends the command with exit code 0, unless a server that runs handles it.

    SIGHUP, which a closed terminal sends, does the same. SystemExit is raised, so that temporary files are removed.
    While the main thread is in a native call, which may take longer than a supervisor waits, nothing can be raised
    there: a thread ends the process then.
    """
    received, ended = Event(), Event()
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def end(number: int, frame: FrameType | None) -> None:
        received.set()
        raise SystemExit(0)

    def watch() -> None:
        while number := reader.recv(1):
            if number[0] == signal.SIGTERM and signal.getsignal(signal.SIGTERM) is end:
                if not ended.wait(NATIVE_SECONDS):
                    say(SIGTERM_ENDED)
                    os._exit(0)
                return

    watching = Thread(target=watch, name="leapahead-sigterm", daemon=True)
    handler = signal.signal(signal.SIGTERM, end)
    if hangs_up := hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # not under nohup
        signal.signal(signal.SIGHUP, lambda number, frame: signal.raise_signal(signal.SIGTERM))
    wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    watching.start()
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)
        if hangs_up:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
        signal.set_wakeup_fd(wakeup)
        ended.set()
        writer.close()
        watching.join()
        reader.close()
        if received.is_set():  # whatever became of the exception
            say(SIGTERM_ENDED)
            raise SystemExit(0) from None


@click.command(
    cls=Command,
    examples=(
        "leapahead serve model.gguf --port 8000",
        "leapahead serve Qwen/Qwen3-0.6B --host 0.0.0.0 --api-key-file keys.txt",
        "leapahead serve model.gguf --draft draft.gguf --served-model-name my-model --drafter-cache drafts.npz",
    ),
)
@click.argument("name", required=False, metavar="[MODEL]", shell_complete=file_names)
@all_of(ADDRESS, MODEL, DRAFTER, DRAFTER_CACHE, WHO, BOUNDS)
@ended_by_sigterm()
def serve(
    name: str | None,
    host: str,
    port: int,
    names: tuple[str, ...],
    max_batch: int,
    prefill_chunk: int | None,
    generation_config: bool,
    tool_call_parser: str | None,
    reasoning_parser: str | None,
    log_prompts: bool,
    api_keys: tuple[str, ...],
    api_key_file: Path | None,
    no_auth: bool,
    cors: tuple[str, ...],
    shared_drafter_cache: bool,
    **values: Any,
) -> None:
    """Serve MODEL by the API of OpenAI, at /v1/completions, /v1/chat/completions and /v1/responses, and by that of
    Anthropic, at /v1/messages.

    The texts are those of plain decoding, whatever is drafted and however many are decoded together; with --exact, in
    half precision and quantised files too, whose rounding may exchange equally likely tokens otherwise. Requests can
    say what they expect (`prediction`). Logs are lines of JSON on standard error, metrics are at /metrics. SIGTERM or
    Ctrl-C ends the server when running requests are answered.
    """
    with needing("leapahead serve", "serve", *PACKAGES):
        from leapahead.serve import app, keys, logs, server, settings
    if name is not None and values["model"] is not None:
        raise BadParameter(f"the model is given twice, as {name!r} and as --model {values['model']}; give it once")
    values["model"] = name = name if name is not None else values["model"]
    given = keys.given(api_keys, api_key_file, os.environ.get(keys.ENVIRONMENT))
    if given and no_auth:
        raise BadParameter(
            f"--no-auth is not possible with an API key, which is given by --api-key, --api-key-file or "
            f"{keys.ENVIRONMENT}; leave out one of them"
        )
    bounds = {key: values.pop(key) for key in OF_LIMITS}
    limits = settings.Limits(**{NAMES.get(key, key): value for key, value in bounds.items()})
    chosen = settings.Settings(
        names=tuple(dict.fromkeys(names)) or (str(name or "bundled"),),
        keys=given,
        cors=cors,
        share_drafter_cache=shared_drafter_cache,
        log_prompts=log_prompts,
        tool_call_parser=tool_call_parser,
        reasoning_parser=reasoning_parser,
        limits=limits,
    )
    listening = server.bound(host, port)
    with listening:
        if not given and not no_auth and not is_loopback(listening):
            raise BadParameter(
                f"--host {host} lets other machines in, which needs an API key: set {keys.ENVIRONMENT}, "
                "or give --api-key-file; --no-auth lets everybody in"
            )
        logs.set_up()
        llm = open_llm(values, max_batch, prefill_chunk, saves=False)  # the worker does
        if generation_config:
            chosen = replace(chosen, defaults=model_defaults(llm))
        if isinstance(llm.target, WarmsUp):
            llm.target.warm_up(max_batch)
        if llm.target.info.kv_cache:
            logs.event("kv_cache", chosen=llm.target.info.kv_cache)
        application, worker = app.make(llm, chosen)
        server.run(application, worker, limits, listening)


def is_loopback(listening: socket.socket) -> bool:
    """Whether only this machine reaches a socket."""
    found = ipaddress.ip_address(listening.getsockname()[0].partition("%")[0])  # without the zone of an IPv6 address
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_loopback


def model_defaults(llm: LLM) -> dict[str, float]:
    """The sampling parameters of a model's generation_config.

    Raises:
        BadParameter: the model has none.
    """
    config = getattr(getattr(llm.target, "model", None), "generation_config", None)  # of Transformers only
    if config is None:
        raise BadParameter(
            f"--generation-config is not possible with {llm.target.info.name}: it is read of models of Transformers "
            "only; leave it out"
        )
    found = {name: getattr(config, name, None) for name in DEFAULTS}
    if getattr(config, "do_sample", None) is False:
        found["temperature"] = 0.0
    return {name: value for name, value in found.items() if value is not None}
