"""`leapahead serve`: an OpenAI-compatible server. What it needs beside the library is imported when it starts."""

from __future__ import annotations

import ipaddress
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from types import FrameType
from typing import Any

import click

from leapahead.cli.cache import DRAFTER_CACHE
from leapahead.cli.command import Command, file_names, option, say
from leapahead.cli.options import DRAFTER, EXISTING_FILE, MODEL, all_of
from leapahead.cli.served import BOUNDS, LIMITS, PACKAGES, SERVED, application, count, limits_given, named_model
from leapahead.cli.typed import Finite
from leapahead.core.errors import BadParameter, needing

SERVER, ACCESS = "Server options", "Access options"
NATIVE_SECONDS = 5.0  # that SIGTERM waits for the end of a native call in the load of a model; Docker waits 10 in all
SIGTERM_ENDED = "ended by SIGTERM, before the server was ready"

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
    option("--log-prompts", is_flag=True, group=SERVER, help="Let the log contain prompts and texts."),
    option(
        "--enable-tokenizer-info-endpoint",
        "tokenizer_info",
        is_flag=True,
        group=SERVER,
        help="Tell the chat template and what else the tokenizer was made with, at /tokenizer_info.",
    ),
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


def _seconds(name: str, help_text: str, default: float | None = None, zero: bool = False) -> Any:
    kind = Finite(min=0.0, min_open=not zero)
    return option(name, type=kind, default=default, metavar="SECONDS", group=LIMITS, help=help_text)


QUEUE = (
    count("--max-queue", "Greatest number of texts that wait to be decoded; more are answered with 429.", 256, 0),
    count("--max-body-bytes", "Greatest size of a request's body in bytes.", 4 * 2**20),
    _seconds("--header-seconds", "Longest time for the headers of a request.", 10.0),
    _seconds("--body-seconds", "Longest time for the body of a request.", 60.0),
    _seconds("--send-seconds", "A client that reads nothing of its answer for so long is cancelled.", 60.0),
    _seconds("--request-seconds", "Longest time for a request, the queue included; by default not limited."),
    _seconds("--shutdown-seconds", "How long running requests may go on after SIGTERM.", 30.0, zero=True),
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
@all_of(ADDRESS, SERVED, MODEL, DRAFTER, DRAFTER_CACHE, WHO, BOUNDS, QUEUE)
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
    tokenizer_info: bool,
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
        from leapahead.serve import keys, logs, server, settings
    model = named_model(name, values)
    given = keys.given(api_keys, api_key_file, os.environ.get(keys.ENVIRONMENT))
    if given and no_auth:
        raise BadParameter(
            f"--no-auth is not possible with an API key, which is given by --api-key, --api-key-file or "
            f"{keys.ENVIRONMENT}; leave out one of them"
        )
    limits = settings.Limits(**limits_given(values))
    chosen = settings.Settings(
        names=tuple(dict.fromkeys(names)) or (model,),
        keys=given,
        cors=cors,
        share_drafter_cache=shared_drafter_cache,
        log_prompts=log_prompts,
        tool_call_parser=tool_call_parser,
        reasoning_parser=reasoning_parser,
        tokenizer_info=tokenizer_info,
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
        served, worker = application(values, chosen, max_batch, prefill_chunk, generation_config)
        if kv_cache := worker.llm.llm.target.info.kv_cache:
            logs.event("kv_cache", chosen=kv_cache)
        server.run(served, worker, limits, listening)


def is_loopback(listening: socket.socket) -> bool:
    """Whether only this machine reaches a socket."""
    found = ipaddress.ip_address(listening.getsockname()[0].partition("%")[0])  # without the zone of an IPv6 address
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_loopback
