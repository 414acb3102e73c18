"""`python -m research devices`: when methods for several devices pay, simulated from what is measured on one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from threading import Thread
from time import perf_counter
from typing import Any

import click

from leapahead.bench.conditions import Data, conditions
from leapahead.cli import screen
from leapahead.cli.command import Command
from leapahead.cli.options import MODEL, all_of
from leapahead.core.errors import BadParameter
from leapahead.models import loading
from leapahead.models.base import Target
from leapahead.models.parallel.link import connected
from leapahead.planner.latency import SIZES, LatencyProfile
from research.command_parts import DATA, length_option, loaded_prompts, out_option, prefix_of, show, write
from research.devices import measured, schedules
from research.devices.schedules import NOTHING, Layers, Run

LOOKAHEAD = ((7, 5, 7), (15, 5, 15), (31, 5, 31))  # W, N and G
DEVICES = (1, 2, 4, 8)
CANDIDATES = (1, 2, 4, 8)
RATIOS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
MESSAGES = (0.0, 0.01, 0.05, 0.2)  # of a plain forward
DRAFT_LENGTHS = range(1, 17)
TRIPS = 300  # messages that are timed
MESSAGE_BYTES = 500


@click.command(
    cls=Command, examples=("python -m research devices --times build/standin-135m --out docs/figures/devices",)
)
@all_of(MODEL, DATA)
@click.option("--draft", default=loading.BUNDLED, show_default=True, metavar="MODEL", help="Draft model of the target.")
@click.option(
    "--times",
    metavar="MODEL",
    help="Model whose forwards are timed, for example a stand-in.  [default: the model of the texts]",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0.1),
    default=20.0,
    show_default=True,
    help="Time of the measurement of T(n).",
)
@length_option(96)
@out_option("devices")
def main(draft: str, times: str | None, seconds: float, max_new_tokens: int, out: Path, **values: Any) -> None:
    """Simulate lookahead parallelism, pipelined decoding and overlapped drafting on several devices.

    Nothing is run on several devices here. Measured on one device: the time of forwards by their rows and layers, the
    texts of the model, at which layers an early exit knows the next token, where a draft model is right, and the trees
    and accepted paths of lookahead decoding. Simulated, event by event: what several devices would do with them.
    """
    prefix = prefix_of(out)
    if max_new_tokens > 250:
        raise BadParameter(
            f"--max-new-tokens={max_new_tokens} is not possible: at most 250 tokens of a text are compared"
        )
    loaded, prompts, named = loaded_prompts(dict(values), max_new_tokens)
    place = {"device": values["device"]}  # times of several models are compared
    timed = loaded if times is None else loading.load(times, **place)
    model = measured.transformers_target(loaded.target)
    named_draft = loading.bundled("tiny-draft") if draft == loading.BUNDLED else draft
    drafter = loading.load(named_draft, dtype=values["dtype"], **place)
    if drafter.target.info.vocab_size != model.info.vocab_size:
        raise BadParameter(f"--draft {draft} is not possible: its vocabulary is not that of {model.info.name}")
    with screen.progress("devices") as bar:
        bar("times", 0, 4)
        curve = measured.curve(timed.target, SIZES, seconds)
        layer, head = measured.layer_times(timed.target)
        ratio = min(measured.curve(drafter.target, (1,), 1.0).values()) / measured.curve(model, (1,), 1.0)[1]
        message = _message()
        bar("texts", 1, 4)
        pairs = measured.texts(model, prompts, max_new_tokens, loaded.eos_token_ids)
        right = [[rank == 0 for rank in text] for text in measured.ranks(drafter.target, pairs, 1)]
        exits = measured.exits(model, pairs, max(CANDIDATES), bar)
        bar("lookahead", 3, 4)
        steps = {
            sizes: measured.recorded(model, prompts, sizes, max_new_tokens, loaded.eos_token_ids) for sizes in LOOKAHEAD
        }
    profile = LatencyProfile(curve, fixed=True)
    agreement = sum(map(sum, right)) / sum(map(len, right))
    layers = _layers(timed.target, profile, layer, head)
    found: Data = {
        "figure": "devices",
        "conditions": conditions(
            timed.target,
            prompts=len(prompts),
            data=named,
            max_new_tokens=max_new_tokens,
            texts_of=model.info.name,
            draft=draft,
        ),
        "plain_seconds": profile(1),
        "curve": {str(n): took for n, took in curve.items()},
        "layer_seconds": layers.layer(1),
        "head_seconds": layers.head,
        "message_seconds": message,
        "draft": {"agreement": agreement, "ratio": ratio},
        "exits": _agreements(exits, model.info.layers),
        "lookahead": _lookahead(steps, profile),
        "pipelined": _pipelined(exits, model.info.layers, layers, profile(1)),
        "overlapped": _overlapped(right, profile),
    }
    _show(found)
    write(found, prefix)


def _message() -> float:
    """Seconds of a message between two threads of this process, over its loopback interface."""
    one, other = connected(2)

    def answer() -> None:
        for _ in range(TRIPS):
            other.send(0, other.receive(0))

    thread = Thread(target=answer)
    thread.start()
    took, data = [], b"x" * MESSAGE_BYTES
    for _ in range(TRIPS):
        began = perf_counter()
        one.send(1, data)
        one.receive(1)
        took.append(perf_counter() - began)
    thread.join()
    return median(took) / 2


def _layers(target: Target, profile: LatencyProfile, layer: float, head: float) -> Layers:
    """The parts of a plain forward in the ratio that was measured; more rows stretch a layer as the whole."""
    count = target.info.layers
    share = layer / (count * layer + head)  # of a plain forward
    return Layers(count, lambda rows: share * profile(rows), profile(1) * (1 - count * share))


def _agreements(exits: dict[int, list[list[int]]], layers: int) -> list[Data]:
    """Of each exit, how often the next token is among the k likeliest, for k = 1, 2, 4, ..."""
    return [
        {
            "layers": number,
            "of": layers,
            "within": {
                str(k): sum(rank < k for text in texts for rank in text) / sum(map(len, texts)) for k in CANDIDATES
            },
        }
        for number, texts in exits.items()
    ]


def _sum(runs: Sequence[Run]) -> Run:
    total = NOTHING
    for run in runs:
        total += run
    return total


def _lookahead(steps: dict[tuple[int, int, int], list[list[schedules.Step]]], profile: LatencyProfile) -> list[Data]:
    found = []
    for sizes, texts in steps.items():
        for devices in DEVICES:
            for message in MESSAGES:
                run = _sum([schedules.lookahead(text, devices, profile, message * profile(1)) for text in texts])
                rows = [max(each) for text in texts for each in schedules.rows_of(text, devices)]
                found.append(
                    {
                        "sizes": ", ".join(map(str, sizes)),
                        "devices": devices,
                        "message": message,
                        "acceptance_length": run.tokens / run.steps,
                        "rows": sum(rows) / len(rows),
                        "speedup": run.tokens * profile(1) / run.seconds,
                        "busy": run.busy / (run.seconds * devices),
                    }
                )
    return found


def _pipelined(exits: dict[int, list[list[int]]], count: int, layers: Layers, plain: float) -> list[Data]:
    found = []
    for candidates in CANDIDATES:
        for devices in sorted({2, *(1 + 2**power for power in range(4) if 2**power <= candidates)}):
            for message in MESSAGES:
                best: Data = {"speedup": 0.0}
                for number, texts in exits.items():
                    if 2 * number < count:
                        continue
                    exit_after = -(-layers.count * number // count)
                    run = _sum(
                        [
                            schedules.pipelined(text, layers, exit_after, candidates, devices, message * plain)
                            for text in texts
                        ]
                    )
                    correct = sum(rank < candidates for text in texts for rank in text) / run.tokens
                    formula = schedules.pipelined_formula(layers.count, exit_after, 1000, correct) / 1000
                    row = {
                        "candidates": candidates,
                        "devices": devices,
                        "message": message,
                        "exit": number / count,
                        "correct": correct,
                        "speedup": run.tokens * plain / run.seconds,
                        "formula": layers.count / formula,
                        "busy": run.busy / (run.seconds * devices),
                    }
                    best = max(best, row, key=lambda each: float(each["speedup"]))
                found.append(best)
    return found


def _overlapped(right: list[list[bool]], profile: LatencyProfile) -> list[Data]:
    plain, tokens, found = profile(1), sum(map(len, right)), []
    for ratio in RATIOS:
        draft = ratio * plain
        serial = {
            gamma: _sum([schedules.serial(text, gamma, draft, profile) for text in right]).seconds
            for gamma in DRAFT_LENGTHS
        }
        for message in MESSAGES:
            both = {
                gamma: _sum([schedules.overlapped(text, gamma, draft, profile, message * plain) for text in right])
                for gamma in DRAFT_LENGTHS
            }
            gamma = min(both, key=lambda each: both[each].seconds)
            in_turns = min(serial, key=lambda each: serial[each])
            found.append(
                {
                    "ratio": ratio,
                    "message": message,
                    "gamma": gamma,
                    "speedup": tokens * plain / both[gamma].seconds,
                    "busy": both[gamma].busy / (2 * both[gamma].seconds),
                    "serial_gamma": in_turns,
                    "serial": tokens * plain / serial[in_turns],
                }
            )
    return found


def _show(found: Data) -> None:
    show(
        ("W, N, G", "devices", "message", "acceptance length", "rows", "speed-up"),
        [
            (
                row["sizes"],
                row["devices"],
                f"{row['message']:g}",
                f"{row['acceptance_length']:.2f}",
                f"{row['rows']:.1f}",
                f"{row['speedup']:.2f}",
            )
            for row in found["lookahead"]
        ],
    )
    show(
        ("k", "devices", "message", "exit", "correct", "speed-up", "formula"),
        [
            (
                row["candidates"],
                row["devices"],
                f"{row['message']:g}",
                f"{row['exit']:.2f}",
                f"{row['correct']:.1%}",
                f"{row['speedup']:.2f}",
                f"{row['formula']:.2f}",
            )
            for row in found["pipelined"]
        ],
    )
    show(
        ("draft / target", "message", "draft length", "speed-up", "in turns", "draft length"),
        [
            (
                f"{row['ratio']:g}",
                f"{row['message']:g}",
                row["gamma"],
                f"{row['speedup']:.2f}",
                f"{row['serial']:.2f}",
                row["serial_gamma"],
            )
            for row in found["overlapped"]
        ],
    )
    click.echo(
        f"draft model: right in {found['draft']['agreement']:.1%} of tokens; a draft forward takes "
        f"{found['draft']['ratio']:.2f} of a forward here; message {1e6 * found['message_seconds']:.0f} µs"
    )
