"""The cells of `python -m research gpu`: each measures one thing at one cost, and returns plain types."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from time import perf_counter

import torch

from leapahead.bench.conditions import Data
from leapahead.bench.contender import Setting
from leapahead.core.errors import LeapaheadError, Refused, first_line
from leapahead.core.sampling import SamplingParams
from leapahead.core.tree import TokenTree
from leapahead.models.base import Session, Target, read_prompt
from leapahead.models.transformers.static.compiled import LEAST_USES, Compiler
from leapahead.models.transformers.static.executor import StaticExecutor
from research import overhead
from research.gpu import attention, peers
from research.gpu.lab import CAPTURED, COMPILED, EAGER, EXACT, EXACT_EAGER, TINY, Lab
from research.gpu.timing import Clock, median_seconds

SIZES = (1, 2, 4, 8, 16, 32, 64, 96, 128)  # nodes of a step
CONTEXT = 256  # tokens of the prompt of steps that are timed alone
BATCHES = (1, 4, 16)
TEMPERATURES = (0.0, 1.0)
# The preset of the paper for models of this size (2402.02057, table 4: W = 15, N = 5, G = 15).
DRAFTERS: tuple[tuple[str, Data], ...] = (("plain", {}), ("auto", {}), ("lookahead", {"preset": "7b"}))
COPIED = {"cuda": 2**31, "cpu": 2**26}  # bytes
EXACT_DRAFTERS: tuple[tuple[str, Data], ...] = (("auto", {}), ("recycling", {}))
LONGEST_COMPILATION = 60.0  # seconds, of one forward
EXACT_BATCH = 8  # sequences, whose roots fill a forward of exact mode


@dataclass(frozen=True)
class Cell:
    """One measurement.

    Attributes:
        name: of its file.
        what: a few words for the progress line.
        seconds: that it may take on a GPU; it measures less where it cannot keep to them.
        measure: returns what was found.
    """

    name: str
    what: str
    seconds: float
    measure: Callable[[Lab, Clock], Data]


def bandwidth(lab: Lab, clock: Clock) -> Data:
    """Bytes per second of copies on the device, bytes read and written together, and of a kernel that only reads."""
    size = COPIED.get(lab.device.type, COPIED["cpu"])
    source = torch.ones(size, dtype=torch.uint8, device=lab.device)
    goal = torch.empty_like(source)
    copied = median_seconds(lambda: goal.copy_(source), lab.device, lab.settings.rounds)
    numbers = source.view(torch.float32)
    read = median_seconds(numbers.sum, lab.device, lab.settings.rounds)
    return {"bytes": size, "bytes_per_second": 2 * size / copied, "read_bytes_per_second": size / read}


def plain(lab: Lab, clock: Clock) -> Data:
    """Plain decoding of one sequence: captured, and operation by operation."""
    prompts = lab.prompts(lab.tasks[0], min(2, lab.settings.prompts))
    setting = Setting(max_new_tokens=lab.settings.max_new_tokens)
    rows = []
    for kind in (CAPTURED, EAGER):
        try:
            rows.append({"engine": kind, **lab.speed(kind, "plain", {}, prompts, setting)[0]})
        except Refused as error:
            rows.append({"engine": kind, "refused": first_line(error)})
    return {"weights": lab.weights, "rows": rows}


def compiled(lab: Lab, clock: Clock) -> Data:
    """Plain decoding and `auto` for one sequence, once the forwards in use are compiled in the background."""
    executor = lab.loaded(COMPILED).target.executor  # type: ignore[attr-defined]
    assert isinstance(executor, StaticExecutor)
    told: list[str] = []
    executor.compiler = compiler = Compiler(tell=told.append)
    prompts = lab.prompts(lab.tasks[0], min(2, lab.settings.prompts))
    setting = Setting(max_new_tokens=max(lab.settings.max_new_tokens, LEAST_USES + 1))
    try:
        for parts, drafter in ((2, "plain"), (1, "auto")):
            part = clock.part(clock.left / parts)
            _compile_those_in_use(lab, drafter, prompts, setting, compiler, told, part)
    finally:  # nothing is measured beside the compiler, here or in the cells that follow
        compiler.close()
        compiler.wait(LONGEST_COMPILATION)
    if not any(line.startswith("compiled") for line in told):
        raise Refused(compiler.problem or "no forward was compiled in the time that was left")
    rows: list[Data] = []
    for drafter in ("plain", "auto"):
        row, _ = lab.speed(COMPILED, drafter, {}, prompts, setting)
        rows.append({**row, "speed_up": row["tokens_per_second"] / (rows or [row])[0]["tokens_per_second"]})
    return {"engine": COMPILED, "told": told, "rows": rows}


def _compile_those_in_use(
    lab: Lab,
    drafter: str,
    prompts: Sequence[list[int]],
    setting: Setting,
    compiler: Compiler,
    told: Sequence[str],
    clock: Clock,
) -> None:
    """Decodes until two passes in a row found all compiled that they use often."""
    quiet = 0
    while quiet < 2 and not clock.has_run_out and not compiler.problem:
        before = len(told)
        lab.speed(COMPILED, drafter, {}, prompts, setting, passes=1)
        quiet = quiet + 1 if len(told) == before and not compiler.is_busy else 0


def transformers_static(lab: Lab, clock: Clock) -> Data:
    """Transformers' own `generate` with a static cache, compiled where it compiles."""
    return peers.transformers_static(lab, lab.prompts(lab.tasks[0], 1)[0])


def vllm(lab: Lab, clock: Clock) -> Data:
    """vLLM on a model of the same shapes."""
    return peers.vllm(lab, lab.prompts(lab.tasks[0], 1)[0], clock)


def curve(lab: Lab, clock: Clock) -> Data:
    """T(n): milliseconds of a step of n nodes, its choices included, of captured and of other forwards."""
    rows: list[Data] = []
    for kind in (CAPTURED, EAGER):
        try:
            target = lab.loaded(kind).target
        except Refused as error:
            rows.append({"engine": kind, "refused": first_line(error)})
            continue
        prompt = _prompt(lab)
        found = overhead.cost_curve(target, prompt, SIZES, lab.settings.rounds)  # type: ignore[arg-type]
        rows.append({"engine": kind, "context": len(prompt), "milliseconds": {str(n): ms for n, ms in found.items()}})
    return {"rows": rows}


def speculation(lab: Lab, clock: Clock, task: str, temperature: float, batch: int) -> Data:
    """Plain decoding, `auto`, and lookahead decoding, all on captured forwards where there are any."""
    prompts = lab.prompts(task, max(batch, lab.settings.prompts), least=batch)
    setting = Setting(temperature, batch, lab.settings.max_new_tokens, seed=1)
    kind = CAPTURED if _has(lab, CAPTURED) else EAGER
    rows: list[Data] = []
    expected: list[list[int]] = []
    for drafter, options in DRAFTERS:
        if rows and clock.has_run_out:
            break
        row, done = lab.speed(kind, drafter, options, prompts, setting)
        texts = [text.tokens for text in done.texts]
        expected = expected or texts
        row["differing_texts"] = sum(mine != theirs for mine, theirs in zip(texts, expected, strict=True))
        rows.append({**row, "speed_up": row["tokens_per_second"] / (rows or [row])[0]["tokens_per_second"]})
    return {
        "engine": kind,
        "task": task,
        "temperature": temperature,
        "batch": batch,
        "texts": len(prompts),
        "rows": rows,
    }


def graphs(lab: Lab, clock: Clock) -> Data:
    """Graphs of one sequence's steps: their memory, and how long their captures take."""
    target = lab.loaded(CAPTURED).target
    executor = target.executor  # type: ignore[attr-defined]
    assert isinstance(executor, StaticExecutor)
    executor.graphs.clear()
    session = target.open(_prompt(lab), SamplingParams())
    read_prompt(target, session)
    seconds = []
    for nodes in reversed(SIZES):  # the largest first, whose memory the others share
        tree = TokenTree.chain(session.tokens[-1], session.tokens[: nodes - 1])
        captured, again = (_seconds_of_step(target, session, tree) for _ in range(2))
        seconds.append(max(0.0, captured - again))
    session.close()
    found = {"graphs": len(executor.graphs), "bytes": executor.graphs.bytes}
    return {**found, "capture_seconds": sum(seconds), "longest": max(seconds)}


def _seconds_of_step(target: Target, session: Session, tree: TokenTree) -> float:
    began = perf_counter()
    _ = target.step([session], [tree])[0].logits
    return perf_counter() - began


def outside(lab: Lab, clock: Clock) -> Data:
    """Time of the phases of a step of 64 nodes."""
    kind = CAPTURED if _has(lab, CAPTURED) else EAGER
    target = lab.loaded(kind).target
    steps = min(4 * lab.settings.rounds, target.info.context_length - CONTEXT)
    rows = overhead.overhead(target, (len(_prompt(lab)),), steps)  # type: ignore[arg-type]
    return {"engine": kind, "rows": rows}


def exact(lab: Lab, clock: Clock) -> Data:
    """Exact mode: how fast one text is decoded, and texts that differ from those of plain decoding."""
    setting = Setting(batch=EXACT_BATCH, max_new_tokens=lab.settings.max_new_tokens)
    prices = [
        {"engine": kind, **lab.speed(kind, drafter, {}, lab.prompts(lab.tasks[0], 1), replace(setting, batch=1))[0]}
        for kind, drafter in ((EXACT, "plain"), (EXACT, "auto"), (EXACT_EAGER, "plain"))
    ]
    rows: list[Data] = []
    turn, some = 0, max(EXACT_BATCH, lab.settings.prompts)
    while True:
        for task, (drafter, options) in product(lab.tasks, EXACT_DRAFTERS):
            left = lab.settings.exact_tokens - sum(row["tokens"] for row in rows)
            if rows and (left <= 0 or clock.has_run_out):
                return {"speeds": prices, "rows": rows}
            prompts = lab.prompts(task)[turn * some : (turn + 1) * some][: -(-left // setting.max_new_tokens)]
            if not prompts:  # all were compared
                return {"speeds": prices, "rows": rows}
            _, theirs = lab.speed(EXACT, "plain", {}, prompts, setting, passes=1)
            row, mine = lab.speed(EXACT, drafter, options, prompts, setting, passes=1)
            pairs = zip(mine.texts, theirs.texts, strict=True)
            row |= {"task": task, "texts": len(prompts), "differing_texts": sum(a.tokens != b.tokens for a, b in pairs)}
            rows.append(row)
        turn += 1


def _prompt(lab: Lab) -> list[int]:
    """Of steps that are timed alone."""
    tokens = lab.prompts(lab.tasks[0], 1)[0]
    return (tokens * CONTEXT)[:CONTEXT]


def _has(lab: Lab, kind: str) -> bool:
    try:
        lab.loaded(kind)
    except LeapaheadError:
        return False
    return True


def cells(lab: Lab) -> Iterator[Cell]:
    """Of one cost, the most telling ones first. The last one drops the model."""
    yield Cell("bandwidth", "copies on the device", 5, bandwidth)
    yield Cell("plain", "plain decoding", 20, plain)
    yield Cell("curve", "T(n)", 20, curve)
    yield Cell("outside", "steps of 64 nodes", 10, outside)
    yield Cell("graphs", "captures", 10, graphs)
    tasks = lab.tasks if lab.cost != TINY else lab.tasks[:1]
    for batch, temperature, task in product(BATCHES, TEMPERATURES, tasks):
        measure = partial(speculation, task=task, temperature=temperature, batch=batch)
        what = f"{task}, temperature {temperature:g}, batch {batch}"
        yield Cell(f"{task}-t{temperature:g}-b{batch}", what, 10, measure)
    yield Cell("compiled", "captured forwards, compiled", 60, compiled)
    yield Cell("exact", "exact mode", 40, exact)
    yield Cell("attention", "one layer's attention", 45, attention.measure)
    yield Cell("transformers", "Transformers, compiled", 60, transformers_static)
    yield Cell("vllm", "vLLM", 120, vllm)
