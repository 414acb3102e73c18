"""Compares the llama.cpp target with llama.cpp's own programs on the same files, in turn.

plain      tokens per second of the engine / of `llama-bench -n`
curve      T(n)/T(1) of a step of n nodes / of a batch of n sequences over a shared prompt in `llama-batched-bench`
check      every drafter against plain decoding, token for token

python -m research llama-bench a.gguf b.gguf --bin BUILD/bin --data DATA --out docs/llama-cpp.json
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import click
import llama_cpp
from rich.console import Console
from rich.progress import track

from leapahead import __version__
from leapahead.api import LLM
from leapahead.bench import tasks
from leapahead.cli.command import Command
from leapahead.core.errors import BadParameter
from leapahead.core.processor import physical_cores
from leapahead.core.sampling import SamplingParams
from leapahead.core.stop import StopParams
from leapahead.core.tree import TokenTree, TreeBuilder
from leapahead.drafters.plain import Plain
from leapahead.engine.request import Request
from leapahead.engine.scheduler import Engine
from leapahead.models.base import read_prompt
from leapahead.models.llama_cpp.model import LlamaCppTarget, load
from leapahead.models.llama_cpp.options import LlamaCppOptions
from leapahead.planner.profile import processor
from research.exactness import exactness

SIZES = (1, 2, 4, 8, 16, 32, 64)
CONTEXT = 250
PARTS = ("plain", "curve", "check")


@click.command(cls=Command)
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--bin", "programs", type=click.Path(exists=True, path_type=Path), help="Folder of llama.cpp's programs.")
@click.option("--data", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Folder of prompt sets.")
@click.option("--out", required=True, type=click.Path(dir_okay=False, path_type=Path), help="JSON file to update.")
@click.option("--part", "parts", multiple=True, type=click.Choice(PARTS), help="Only this part.  [default: all]")
@click.option("--threads", type=int, help="CPU threads.  [default: one per core]")
@click.option("--rounds", type=click.IntRange(min=1), default=7, show_default=True, help="Measured rounds.")
@click.option("--prompts", type=click.IntRange(min=1), default=10, show_default=True, help="Prompts of each task.")
@click.option("--tokens", type=click.IntRange(min=1), default=64, show_default=True, help="Tokens of each text.")
def main(
    files: tuple[Path, ...],
    programs: Path | None,
    data: Path | None,
    out: Path,
    parts: tuple[str, ...],
    threads: int | None,
    rounds: int,
    prompts: int,
    tokens: int,
) -> None:
    """Measure each of FILES, and write the figures with their conditions."""
    parts = parts or PARTS
    if programs is None and {"plain", "curve"} & set(parts):
        raise click.UsageError("--part plain and curve need --bin, the folder of llama-bench and llama-batched-bench")
    if data is None and "check" in parts:
        raise click.UsageError("--part check needs --data, a folder of prompt sets")
    threads = threads or physical_cores()
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8")) if out.is_file() else {}
    machine = f"{threads} threads, {processor()}; leapahead {__version__}, llama-cpp-python {llama_cpp.__version__}"
    turns = f"{rounds} rounds, both sides in turn"
    conditions = {
        "plain": f"twice {tokens} tokens from an empty context a round, after a warm-up, {turns}; {machine}.",
        "curve": f"{CONTEXT} tokens of context, {turns}; {machine}.",
        "check": f"HumanEval and GSM8K, temperature 0 and 1, batch 1 and 4, up to 128 tokens a text; {machine}.",
    }
    found.setdefault("conditions", {}).update({part: conditions[part] for part in parts})
    console = Console(stderr=True)
    for file in files:
        row = found.setdefault("files", {}).setdefault(file.stem, {})
        console.rule(file.stem)
        if "plain" in parts:
            assert programs is not None
            row["plain"] = plain(file, programs / "llama-bench", threads, rounds, tokens)
        if "curve" in parts:
            assert programs is not None
            row["curve"] = curve(file, programs / "llama-batched-bench", threads, rounds)
        if "check" in parts:
            assert data is not None
            target, tokenizer = load(file, LlamaCppOptions(n_threads=threads))
            llm = LLM(target, tokenizer=tokenizer, drafter_cache=False)
            texts = {task.name: task.texts for task in tasks.read(data, tasks.TEXTS, prompts)}
            row["check"] = exactness(llm, texts, console)
        out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def plain(file: Path, program: Path, threads: int, rounds: int, tokens: int) -> dict[str, float]:
    """Tokens per second of plain decoding from an empty context, and the time per token outside of llama.cpp."""
    target = _load(file, threads)
    engine = Engine(target, max_batch=1)
    drafter = engine.drafter(Plain)
    words = [str(program), "-m", str(file), "-t", str(threads), "-p", "0", "-n", str(tokens), "-r", "2", "-o", "json"]
    ours, theirs, outside = list[float](), list[float](), list[float]()

    def text() -> tuple[float, float]:
        start, inside = perf_counter(), target.context.seconds
        handle = engine.submit(Request([1], drafter, stop=StopParams(max_new_tokens=tokens)))
        engine.run([handle])
        spent, inside = perf_counter() - start, target.context.seconds - inside
        target.forget()
        return len(handle.tokens) / spent, 1e3 * (spent - inside) / len(handle.tokens)

    def here() -> None:
        text()  # llama-bench warms up in each run as well, and takes the mean of two runs
        both = [text(), text()]
        ours.append(sum(speed for speed, _ in both) / 2)
        outside.append(sum(rest for _, rest in both) / 2)

    def there() -> None:
        theirs.append(float(json.loads(_printed(words))[0]["avg_ts"]))

    _in_turn(f"{file.stem}: plain", rounds, here, there)
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    return {
        "ours": round(median(ours), 2),
        "llama_bench": round(median(theirs), 2),
        "ratio": round(median(ratios), 4),
        "low": round(min(ratios), 4),
        "high": round(max(ratios), 4),
        "outside_ms": round(median(outside), 3),
    }


def curve(file: Path, program: Path, threads: int, rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds of a step by number of nodes, as chains and as trees of chains of three nodes, and of llama.cpp's.

    `outside` is the target's own time outside of llama.cpp: building batches, reading logits, moving sequence ids.
    """
    target = _load(file, threads)
    words = [str(program), "-m", str(file), "-t", str(threads), "-tb", str(threads), "-c", "4096", "-pps", "-kvu"]
    words += ["-npp", str(CONTEXT), "-ntg", "8", "-npl", ",".join(map(str, SIZES)), "--output-format", "jsonl"]
    session = target.open([1 + i % 200 for i in range(CONTEXT)], SamplingParams())
    read_prompt(target, session)
    times: dict[str, dict[int, list[float]]] = {
        name: {n: [] for n in SIZES} for name in ("chain", "tree", "batched_bench", "outside")
    }

    def here() -> None:
        for n in SIZES:
            for name in ("chain", "tree"):
                for turn in range(9):
                    root = session.tokens[-1]
                    tree = TokenTree.chain(root, [2] * (n - 1)) if name == "chain" else _bushy(root, n)
                    start, inside = perf_counter(), target.context.seconds
                    choices = target.step([session], [tree])[0]
                    _ = choices[0]
                    session.track.discard_tree()  # costs as much as a commit, and leaves the context unchanged
                    spent, inside = perf_counter() - start, target.context.seconds - inside
                    if turn:
                        times[name][n].append(1e3 * spent)
                        times["outside"][n].append(1e3 * (spent - inside))

    def there() -> None:
        for line in _printed(words).splitlines():
            if line.startswith("{"):
                row = json.loads(line)
                times["batched_bench"][row["pl"]].append(1e3 * row["t_tg"] / row["tg"])

    _in_turn(f"{file.stem}: curve", rounds, here, there)
    return {name: {str(n): round(median(ms), 3) for n, ms in each.items()} for name, each in times.items()}


def _load(file: Path, threads: int) -> LlamaCppTarget:
    return load(file, LlamaCppOptions(n_threads=threads, n_ctx=2048))[0]


def _bushy(root: int, nodes: int) -> TokenTree:
    """A tree of chains of three nodes under the root."""
    builder = TreeBuilder(root)
    tip = 0
    for node in range(1, nodes):
        added = builder.add(0 if node % 3 == 1 else tip, 3 + node)
        assert added is not None
        tip = added
    return builder.build()


def _in_turn(what: str, rounds: int, *sides: Callable[[], None]) -> None:
    """Runs all sides in turn, after a warm-up of each."""
    for side in sides:
        side()
    for turn in track(range(rounds), description=what):
        for side in sides if turn % 2 else sides[::-1]:
            side()


def _printed(words: list[str]) -> str:
    try:
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise BadParameter(f"{words[0]} cannot be run: {error}") from None
