"""Generated tables of docs/research/serving.md: our server beside llama.cpp's, from docs/bench/serving*.json."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Table = Callable[[str, Iterable[Sequence[str]]], str]
HEADS = (
    "answer | workload | at a time | tokens/s | ratio by round | first token, ms | a token, ms | 95 % | a piece, 95 %"
)
USED = ("leapahead", "llama-cpp-python")


@dataclass
class Part:
    """One server of ours in one record, row by row beside llama.cpp's.

    Attributes:
        known: conditions of the record.
        options: what our server was given.
        pairs: rows of ours and theirs.
        forms: whether the record compares several servers of ours.
    """

    known: Row
    options: tuple[str, ...]
    pairs: list[tuple[Row, Row]]
    forms: bool

    @property
    def name(self) -> str:
        """Model, type and engine in words, or the options of a form."""
        if self.forms:
            return f"`{' '.join(each for each in self.options if 'kv-unified' in each)}`"
        cost, kind = self.known["model"].removesuffix(".gguf").split("-", 1)
        engine = "OpenVINO" if "--engine=openvino" in self.options else "llama.cpp"
        return f"{cost.upper()}, {kind}, {engine}"


def blocks(table: Table) -> dict[str, Callable[[Path], str]]:
    """Name of each block -> its text."""
    return {
        "serving-summary": lambda root: summary(root, table),
        "serving": lambda root: tables(root, table),
        "serving-chats": lambda root: chats(root, table),
        "serving-forms": lambda root: forms(root, table),
        "serving-stall": lambda root: stall(root, table),
        "serving-memory": lambda root: memory(root, table),
    }


def parts(root: Path, chats: bool = False) -> Iterator[Part]:
    """Every server of ours in every record: in those of chats alone, or in the others."""
    files = (root / "docs/bench/serving").glob("*.json")
    for file in sorted(file for file in files if ("-chat" in file.stem) == chats):
        data = json.loads(file.read_text(encoding="utf-8"))
        known, rows = data["conditions"], data["rows"]
        servers = list(dict.fromkeys(row["server"] for row in rows))  # the last is llama.cpp's
        options, beside = known.get("options", []), known.get("beside", [])
        replaced = {f"--no-{other[2:]}" for other in beside} | {each for each in beside if each == "--ctx-size"}
        kept = [each for at, each in enumerate(options) if not {each, *options[max(at - 1, 0) : at]} & replaced]
        for index, given in zip(range(len(servers) - 1), (options, [*kept, *beside]), strict=False):
            ours, theirs = rows[index :: len(servers)], rows[len(servers) - 1 :: len(servers)]
            yield Part(known, tuple(given), list(zip(ours, theirs, strict=True)), bool(beside))


def _models(found: Iterable[Part]) -> dict[str, list[Part]]:
    """Parts by their names; smaller models first, in each the engine llama.cpp first."""
    together: dict[str, list[Part]] = {}
    for part in found:
        together.setdefault(part.name, []).append(part)
    order = sorted(together, key=lambda name: (name.startswith("1B"), "OpenVINO" in name, name))
    return {name: together[name] for name in order}


def _span(ratios: Sequence[float]) -> str:
    low, high = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
    return low if low == high else f"{low} to {high}"


def summary(root: Path, table: Table) -> str:
    """Least and greatest ratio of the rounds, by model and engine, workload, and requests at a time."""
    lines = []
    for name, some in _models(part for part in parts(root) if not part.forms).items():
        cells: dict[tuple[str, int], dict[int, str]] = {}
        for part in some:
            for ours, _ in part.pairs:
                cell = cells.setdefault((ours["workload"], part.known["max_tokens"]), {})
                cell[ours["concurrent"]] = _span(ours["ratios"])
        for (workload, tokens), each in sorted(cells.items(), key=lambda pair: (pair[0][0] == "edit", pair[0][1])):
            lines.append([name, workload, str(tokens), *(each.get(count, "") for count in (1, 4, 16))])
    heads = "model, our engine | workload | tokens an answer | 1 at a time | 4 at a time | 16 at a time"
    return table(heads, lines)


def _line(part: Part, ours: Row, theirs: Row) -> list[str]:
    both = [
        f"{ours[key][each]:.1f} / {theirs[key][each]:.1f}"
        for key, each in (("token_ms", "p50"), ("token_ms", "p95"), ("piece_ms", "p95"))
    ]
    return [
        str(part.known["max_tokens"]),
        ours["workload"],
        str(ours["concurrent"]),
        f"{ours['tokens_per_second']:.0f} / {theirs['tokens_per_second']:.0f}",
        ", ".join(f"{ratio:.2f}" for ratio in ours["ratios"]),
        f"{ours['first_ms']:.0f} / {theirs['first_ms']:.0f}",
        *both,
    ]


def _conditions(some: Sequence[Part]) -> str:
    """Of records of one table: requests, rounds and commits by number of requests at a time."""
    known = some[0].known
    counts: dict[str, list[str]] = {}
    for part in some:
        rounds = part.known["rounds"]
        told = f"{part.known['requests']} requests a pass, {rounds} round{'s' * (rounds > 1)}"
        counts.setdefault(told, []).extend(str(ours["concurrent"]) for ours, _ in part.pairs)
    given = ", ".join(
        f"{told} ({' and '.join(sorted(set(levels), key=int))} at a time)"
        for told, levels in sorted(counts.items(), key=lambda pair: min(map(int, pair[1])))
    )
    versions = {name: each for part in some for name, each in part.known["versions"].items() if name in USED}
    if any("--engine=openvino" in part.options for part in some):
        versions["openvino"] = known["versions"]["openvino"]
    commits = sorted({part.known["commit"][:10] for part in some})
    return (
        f"Conditions: `{known['model']}`; {given}, after a warm-up; {known['threads']} threads; {known['cpu']}; "
        f"{', '.join(f'{name} {each}' for name, each in versions.items())}; "
        f"commit{'s' * (len(commits) > 1)} {' and '.join(commits)}."
    )


def _sorted_lines(some: Sequence[Part]) -> list[list[str]]:
    found = [_line(part, ours, theirs) for part in some for ours, theirs in part.pairs]
    order = {"gsm8k": 0, "chat": 1, "edit": 2}
    return sorted(found, key=lambda line: (order[line[1]], int(line[0]), int(line[2])))


def tables(root: Path, table: Table) -> str:
    """A table for each model and engine."""
    found = []
    for name, some in _models(part for part in parts(root) if not part.forms).items():
        found.append(f"### {name}\n\n{table(HEADS, _sorted_lines(some))}\n\n{_conditions(some)}")
    return "\n\n".join(found)


def chats(root: Path, table: Table) -> str:
    """The records of chats alone: a row for each model, engine, processor and number of requests at a time."""
    some: dict[str, list[Part]] = {}
    for name, each in _models(parts(root, chats=True)).items():
        for part in each:
            some.setdefault(f"{name}, {part.known['cpu'].rpartition(' ')[2]}", []).append(part)
    lines = [[name, *line] for name, each in some.items() for line in _sorted_lines(each)]
    heads = f"model, our engine, processor | {HEADS}".replace(" workload |", "")
    given = "\n".join(f"- {name}. {_conditions(each)}" for name, each in some.items())
    return f"{table(heads, [[*line[:2], *line[3:]] for line in lines])}\n\n{given}"


def forms(root: Path, table: Table) -> str:
    """The records that compare forms of the KV cache: a row for each form."""
    some = [part for part in parts(root) if part.forms]
    lines = [[*_line(part, *pair)[1:3], part.name, *_line(part, *pair)[3:]] for part in some for pair in part.pairs]
    order = {"gsm8k": 0, "chat": 1, "edit": 2}
    lines.sort(key=lambda line: (int(line[1]), order[line[0]], line[2]))
    heads = HEADS.removeprefix("answer | ").replace("at a time |", "at a time | form |")
    cells = {(each, " ".join(part.options)) for part in some for each in (part.known["max_tokens"],)}
    given = sorted({options for _, options in cells})
    tokens = sorted({each for each, _ in cells})
    return (
        f"{table(heads, lines)}\n\nAnswers of {' or '.join(map(str, tokens))} tokens. Our servers had "
        f"{'; '.join(f'`{each}`' for each in given)}. {_conditions(some)}"
    )


def stall(root: Path, table: Table) -> str:
    """What running streams notice of a long prompt."""
    data = json.loads((root / "docs/bench/serving-stall.json").read_text(encoding="utf-8"))
    rows = [
        [
            row["server"],
            f"{row['before_ms']['p50']:.0f}, {row['before_ms']['p95']:.0f}",
            f"{row['meanwhile_ms']['p50']:.0f}, {row['meanwhile_ms']['p95']:.0f}",
            f"{row['longest_ms']:.0f}",
            f"{row['first_seconds']:.1f}",
        ]
        for row in data["rows"]
    ]
    known, row = data["conditions"], data["rows"][0]
    heads = "server | before: median, 95 %, ms | meanwhile: median, 95 %, ms | longest, ms | its first token, s"
    return table(heads, rows) + (
        f"\n\nConditions: `{known['model']}`, {row['running']} streams, a prompt of {row['prompt_tokens']} tokens, "
        f"rounds after a warm-up: {known['rounds']}; {known['threads']} threads; {known['cpu']}; "
        f"commit {known['commit']}."
    )


def memory(root: Path, table: Table) -> str:
    """Resident memory of the server."""
    data = json.loads((root / "docs/bench/serving-memory.json").read_text(encoding="utf-8"))
    rows = [[str(row["requests"]), f"{row['resident_mb']:.0f}"] for row in data["rows"]]
    known = data["conditions"]
    return table("requests | resident, MB", rows) + (
        f"\n\nConditions: model {known['model']}, {known['concurrent']} requests at a time, "
        f"{100 * known['aborts']:.0f} % of the clients leave before the end; commit {known['commit']}."
    )
