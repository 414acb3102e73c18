"""The claims in circulation about lookahead decoding, beside what was measured: blocks of docs/research.

Reads docs/figures/*.json, docs/figures.json and the config of the bundled model. The claims are listed in this file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from memory_claims import Row, memory

from leapahead.bench.formula import compression_formula
from leapahead.bench.record import OVERALL, read

Data = dict[str, Any]

NAMES = {
    "humaneval": "HumanEval",
    "gsm8k": "GSM8K",
    "spec_bench/summarization": "summaries",
    "mt_bench/writing": "writing",
}
SPEED = "speed: see the report"
LENGTH = 512  # tokens of the texts whose forward passes are claimed
ALPHA, F = 0.425, 3.106  # in circulation, without the measurements that they were fitted to


def claims(root: Path) -> list[Row]:
    """A row for each claim."""
    greedy, sampled = _pools(root)
    return [
        *_lengths(root, greedy, sampled),
        *_pool(greedy, sampled),
        *_hits(greedy, sampled),
        _convergence(root),
        *_law(root),
        *memory(root, _numbers(root)["memory"]),
        *_exactness(root),
        (
            "settings by kind of text: (W, N, G), and Jacobi iterations",
            "code (8, 6, 15), 12; text (7, 5, 10), 16; creative (5, 4, 8), 20",
            "not compared",
            "The presets `code`, `text` and `creative` are these. A number of iterations is no setting of lookahead "
            "decoding: every step is one iteration of the whole window.",
        ),
        _draft_models(root),
        _trained_heads(root),
        ("cost of training them", "Medusa $120, EAGLE $100, MTP $50,000", "not measured", "No source is given."),
    ]


def _draft_models(root: Path) -> Row:
    speeds = []
    for cost in ("135m", "1b"):
        rows = read(root / "docs/bench/draft" / cost)["results"]
        mine = [row for row in rows if row["drafter"].startswith("draft_model(") and "nodes=" not in row["drafter"]]
        (each,) = (row["speedup"] for row in mine if (row["task"], row["temperature"]) == (OVERALL, 0.0))
        speeds.append(f"{cost.upper()} {each['median']:.2f} ({each['low']:.2f} to {each['high']:.2f})")
    return (
        "speed-up of a draft model",
        "2 to 2.5x",
        ", ".join(speeds),
        "On two CPU cores, with small drafts that agree seldom: [draft models](draft-models.md).",
    )


def _trained_heads(root: Path) -> Row:
    rows = [row for row in read(root / "docs/bench/heads")["results"] if row["task"] == OVERALL]
    found = []
    for temperature, how in ((0.0, "greedy"), (1.0, "temperature 1")):
        same = {row["drafter"]: row["speedup"] for row in rows if row["temperature"] == temperature}
        (head,) = (each for name, each in same.items() if name.startswith("auto(head="))
        interval = f"{head['median']:.2f} ({head['low']:.2f} to {head['high']:.2f})"
        found.append(f"{how} {interval}, without it {same['auto']['median']:.2f}")
    return (
        "speed-up of trained heads",
        "Medusa 2 to 3x, EAGLE 3 to 4x",
        "; ".join(found),
        "An EAGLE-3 in `auto` at the cost of 135M, on two CPU cores: [trained heads](../guide/trained-heads.md).",
    )


def fits(root: Path) -> list[tuple[str, ...]]:
    """temperature, N, alpha, f, rms error, distinct 4-grams; last of each temperature the values in circulation."""
    rows: list[tuple[str, ...]] = []
    for ending, how in (("", "0"), ("-sampled", "1")):
        found = figure(root, f"compression{ending}")
        for which, fit in {"all": found["fit"], **found["fits"]}.items():
            if fit is not None:
                numbers = (f"{fit['alpha']:.3f}", f"{fit['f']:.3f}", f"{fit['rms']:.3f}")
                rows.append((how, which, *numbers, f"{found['distinct_4']:.2f}"))
        rms = math.sqrt(fmean((_circulating(row) - row["step_compression"]) ** 2 for row in found["rows"]))
        rows.append((how, "in circulation", f"{ALPHA}", f"{F}", f"{rms:.3f}", f"{found['distinct_4']:.2f}"))
    return rows


def _circulating(row: Data) -> float:
    return compression_formula(ALPHA, F, row["ngram"], row["window"])


def conditions(root: Path) -> str:
    """What the figures of this page were measured with, one line each."""
    lines = []
    for name in ("pool", "pool-sampled", "compression", "compression-sampled", "jacobi", "match", "match-sampled"):
        found = figure(root, name)
        c = found["conditions"]
        how = f"temperature {c['temperature']:g}" if "temperature" in c else "temperatures 0 and 1"
        words = c["data"]
        if "tasks" in found:  # more than the plot
            words = ", ".join(f"{row['prompts']} {row['task']}" for row in found["tasks"]) + " prompts"
        lines.append(f"- {name}: {words}, up to {c['max_new_tokens']} new tokens, {how}, seed {c['seed']}")
    lines += [
        f"- first row: {_numbers(root)['conditions']['acceptance']}",
        f"- quality, deterministic: {_numbers(root)['conditions']['check']}",
    ]
    c = figure(root, "pool")["conditions"]
    versions = ", ".join(f"{name} {c['versions'][name]}" for name in ("leapahead", "torch", "transformers", "python"))
    lines.append(
        "\nAll but the last two: the bundled model in float32, stopping at EOS, prefill not counted; "
        f"{versions}; {c['cpu']}."
    )
    return "\n".join(lines)


def figure(root: Path, name: str) -> Data:
    found: Data = json.loads((root / f"docs/figures/{name}.json").read_text(encoding="utf-8"))
    return found


# ------------------------------------------------------------------------------------------------- tokens per step


def _lengths(root: Path, greedy: Data, sampled: Data) -> list[Row]:
    table = _numbers(root)["acceptance"]
    own = [row for row in table if row["name"] == "lookahead (15, 5, 15)" and not row["ignore_eos"]]
    overall = "; ".join(
        f"{NAMES[row['task']]}, temperature {row['temperature']:g}: {row['acceptance_length']:.2f} tokens a step "
        f"(distinct 4-grams {row['distinct_4']:.2f})"
        for row in own
    )
    tasks = "humaneval", "spec_bench/summarization", "mt_bench/writing", "gsm8k"
    return [
        (
            "lookahead decoding, overall",
            "1.5 to 2x; 1.7x",
            overall,
            f"Tokens a step bound the speed-up from above; {SPEED}. Published: 2.05 tokens a step and 1.88x on "
            "MT-Bench (2402.02057, table 3).",
        ),
        (
            f"forwards for {LENGTH} tokens of HumanEval",
            "215 (2.38x)",
            _forwards("humaneval", greedy, sampled),
            f"{LENGTH} by tokens a step; long texts weigh most, and greedy they loop. Published: 2.25x for CodeLlama "
            "7B (2402.02057, figure 5).",
        ),
        (
            f"forwards for {LENGTH} tokens of GSM8K",
            "298 (1.72x)",
            _forwards("gsm8k", greedy, sampled),
            "Published: 1.89x for 7B, 1.72x for 13B (2402.02057, figure 5).",
        ),
        (
            f"forwards for {LENGTH} tokens of creative text",
            "341 (1.50x)",
            _forwards("mt_bench/writing", greedy, sampled),
            "No source is given. Few prompts; the greedy texts are short.",
        ),
        (
            "speed-up of Llama-2 by kind of text",
            "7B: code 2.3x, technical 1.9x, creative 1.5x, maths 1.7x; 13B: code 2.5x, technical 2.0x",
            "; ".join(
                f"{NAMES[task]}: {_of(greedy, task)['acceptance_length']:.2f} greedy, "
                f"{_of(sampled, task)['acceptance_length']:.2f} sampled"
                for task in tasks
            ),
            f"Tokens a step of the bundled model: neither Llama-2 was run here; {SPEED}. Published: 13B gains less "
            "than 7B but for one tie (2402.02057, figure 5).",
        ),
    ]


def _forwards(task: str, greedy: Data, sampled: Data) -> str:
    parts = []
    for how, data in (("greedy", greedy), ("sampled", sampled)):
        row = _of(data, task)
        parts.append(
            f"{how}: {LENGTH / row['acceptance_length']:.0f} ({row['acceptance_length']:.2f} tokens a step, "
            f"distinct 4-grams {row['distinct_4']:.2f})"
        )
    return "; ".join(parts)


def _pool(greedy: Data, sampled: Data) -> list[Row]:
    def by_formula(data: Data, hit: str) -> float:
        overall = data["overall"]
        return float(1 + overall[hit] * (overall["per_accepted"] - 1))

    measured = "; ".join(
        f"{how}: {data['overall']['acceptance_length']:.2f} tokens a step; by the formula "
        f"{by_formula(data, 'accepted'):.2f} if a hit is an accepted guess (h = {data['overall']['accepted']:.2f}, "
        f"L = {data['overall']['per_accepted']:.2f}), {by_formula(data, 'hit'):.2f} if it is a guess that was found"
        for how, data in (("greedy", greedy), ("sampled", sampled))
    )
    grown = (0, 64, 128, 256, 512)
    counts, rates = [], []
    for how, data in (("greedy", greedy), ("sampled", sampled)):
        at = {row["tokens"]: row for row in data["at"]}
        rows = [at[n] for n in grown if n in at]
        texts = " / ".join(str(row["prompts"]) for row in rows)
        ngrams = " / ".join(f"{row['ngrams']:.0f}" for row in rows)
        counts.append(f"{how}: {ngrams} (texts: {texts})")
        for what, key in (("found", "hit"), ("accepted", "accepted")):
            shares = ["-" if row[key] is None else f"{100 * row[key]:.0f}" for row in rows]
            rates.append(f"{how}, {what}: {' / '.join(shares)} %")
    return [
        (
            "speed-up = 1 + h (L - 1), h the hit rate, L tokens a hit",
            "an approximation",
            measured,
            "Tokens a step, and only with verified hits; what is over is accepted nodes of the window.",
        ),
        (
            f"forwards for {LENGTH} tokens by that formula",
            "h = 0.5, L = 2.5: 300 (1.71x); h = 0.7, L = 3.5: 200 (2.56x)",
            "; ".join(
                f"h = {h}, L = {length}: {LENGTH / (1 + h * (length - 1)):.0f} ({1 + h * (length - 1):.2f}x)"
                for h, length in ((0.5, 2.5), (0.7, 3.5))
            )
            + " (arithmetic)",
            "The numbers claimed are not what the formula gives.",
        ),
        (
            "entries of the pool after 0 / 64 / 128 / 256 / 512 tokens",
            "0 / 234 / 581 / 1,247 / 2,847",
            "; ".join(counts),
            "The prompt fills the pool before the first step; then G bounds each key. Texts that end early drop out, "
            "so the columns are not the same texts.",
        ),
        (
            "hit rate after as many tokens",
            "0 / 15 / 28 / 41 / 52 %",
            "; ".join(rates),
            "Of all steps up to there. A guess that is found is often wrong. The long greedy texts are those that "
            "repeat themselves.",
        ),
    ]


def _hits(greedy: Data, sampled: Data) -> list[Row]:
    claimed = {
        "humaneval": ("code", "60 to 70 %, 3 to 4 tokens"),
        "spec_bench/summarization": ("technical text (here: summaries)", "50 to 60 %, 2 to 3 tokens"),
        "mt_bench/writing": ("creative text", "30 to 40 %, 2 tokens"),
    }
    rows: list[Row] = []
    for task, (name, value) in claimed.items():
        parts = []
        for how, data in (("greedy", greedy), ("sampled", sampled)):
            row = _of(data, task)
            each = "" if row["per_accepted"] is None else f", {row['per_accepted']:.1f} tokens a step with one"
            parts.append(
                f"{how}: found {100 * row['hit']:.0f} %, accepted {100 * row['accepted']:.0f} %{each} "
                f"(distinct 4-grams {row['distinct_4']:.2f})"
            )
        comment = "No source is given, nor whether a hit is found or accepted."
        rows.append((f"hit rate: {name}", value, "; ".join(parts), comment))
    return [*rows, ("hit rate: templates", "70 to 80 %, 4 to 5 tokens", "not measured", "No source is given.")]


# ---------------------------------------------------------------------------------------------- Jacobi and the law


def _convergence(root: Path) -> Row:
    found = figure(root, "jacobi")
    block = found["block"]

    def shares(values: Sequence[float]) -> str:
        return " / ".join(f"{100 * value:.0f}" for value in values[1:7])

    parts = [
        f"temperature {curve['temperature']:g}: {shares(curve['mean'])} %, of which may be kept "
        f"{shares(curve['settled'])} % (distinct 4-grams {curve['distinct_4']:.2f})"
        for curve in found["curves"]
    ]
    speeds = " and ".join(f"{curve['tokens_per_iteration']:.2f}" for curve in found["curves"])
    return (
        "Jacobi: positions that are right after 1 / 2 / ... / 6 iterations",
        "15 / 35 / 58 / 78 / 91 / 97 %",
        f"blocks of {block}: " + "; ".join(parts),
        f"An iteration makes at least one more position right, whatever the model: {_free(block)} % of {block}. What "
        f"is measured lies little above; as decoding it is {speeds} tokens an iteration. No block length comes with "
        f"the claim; of a block of 6, {_free(6)} % come for nothing.",
    )


def _law(root: Path) -> list[Row]:
    rows: list[Row] = []
    for ending, how in (("", "greedy"), ("-sampled", "sampled")):
        found = figure(root, f"compression{ending}")
        fit, longest = found["fit"], max(row["ngram"] for row in found["rows"])
        s = {row["window"]: row["step_compression"] for row in found["rows"] if row["ngram"] == longest}
        gains = " / ".join(f"{s[2 * w] - s[w]:+.2f}" for w in sorted(s) if 2 * w in s)
        value = f"α = {fit['alpha']:.3f}, f = {fit['f']:.3f}, rms error {fit['rms']:.3f}" if fit else found["note"]
        rows.append(
            (
                f"law of step compression, {how}",
                f"α = {ALPHA}, f = {F}: +0.25 for each doubling of W = G from 8 on",
                f"{value}; S from W = 1 to {max(s)} at N = {longest}: {min(s.values()):.2f} to {max(s.values()):.2f}, "
                f"by doubling {gains} (distinct 4-grams {found['distinct_4']:.2f})",
                "2402.02057, equations 5 and 7, fitted to all N together. The two numbers are those of a model and its "
                "texts, and do not carry over.",
            )
        )
    return rows


# ----------------------------------------------------------------------------------------------------- exactness


def _exactness(root: Path) -> list[Row]:
    rows = _numbers(root)["check"]
    own = [row for row in rows if row["drafter"] == "lookahead"]
    tokens, mismatches = (sum(row[name] for row in own) for name in ("tokens", "mismatches"))
    same = f"{tokens:,} tokens compared, {mismatches} mismatches"
    return [
        (
            "quality",
            "HumanEval 26.8, MMLU 45.2, GSM8K 42.1, the same with and without",
            same,
            'Only "the same" means anything, and it is stronger than equal scores: the same text, which `leapahead '
            "check` proves on your model.",
        ),
        (
            "deterministic",
            "lookahead yes; Medusa, EAGLE and draft models no",
            f"lookahead, temperatures 0 and 1: {same}",
            "All of them are deterministic when greedy. With a temperature, the same seed gives the same text here; "
            "speculative sampling keeps the distribution.",
        ),
    ]


# ----------------------------------------------------------------------------------------------------------- parts


def _pools(root: Path) -> tuple[Data, Data]:
    return figure(root, "pool"), figure(root, "pool-sampled")


def _numbers(root: Path) -> Data:
    found: Data = json.loads((root / "docs/figures.json").read_text(encoding="utf-8"))
    return found


def _free(block: int) -> str:
    """Per cent of a block that is right after 1 to 6 iterations at the least."""
    return " / ".join(f"{100 * k / block:.0f}" for k in range(1, 7))


def _of(data: Data, task: str) -> Data:
    found: Data = next(row for row in data["tasks"] if row["task"] == task)
    return found


# ---------------------------------------------------------------------------------------------------------- blocks


def blocks(table: Callable[[str, Sequence[Sequence[str]]], str]) -> dict[str, Callable[[Path], str]]:
    """Name of the block -> its text."""
    return {
        "claims": lambda root: (
            table("claim | claimed | here | comment".replace(" | ", "|"), claims(root))
            + "\n\nConditions:\n\n"
            + conditions(root)
        ),
        "compression-fit": lambda root: table("temperature|fitted to N|α|f|rms error|distinct 4-grams", fits(root)),
        "figure-cost": _cost,
    }


def _cost(root: Path) -> str:
    """The plot that needs a quiet machine, once it is there."""
    if not (root / "docs/figures/cost.svg").is_file():
        return "Not measured yet: `python -m research figures --part cost`."
    return "![Cost of a forward over n tokens](../figures/cost.svg)"
