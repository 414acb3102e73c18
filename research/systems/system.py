"""A row of the table of systems, as data. Its command is the one that is printed, and the one that is measured."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from leapahead.bench.contender import Configuration
from leapahead.cli.generate import generate
from leapahead.cli.options import drafter_arguments, model_arguments
from leapahead.core.relaxed import rule

EXACT, DISTRIBUTION, RELAXED = "exact", "exact in distribution", "relaxed"
RULES = (EXACT, DISTRIBUTION, RELAXED)
TEXT, REPAIR = "text", "repair"  # what is prompted with: HumanEval and GSM8K, or damaged code
NOT_FOUND = "not found"
PROGRAM = ["leapahead", "generate"]
BUILT = re.compile(r"build/[\w./+-]+")  # a path of trained weights, or of a file that `before` makes


@dataclass(frozen=True)
class Published:
    """What a paper or a leaderboard reports.

    Attributes:
        speedup: over plain decoding, `NOT_FOUND` where no figure was found.
        length: the acceptance length, in tokens a step of the target.
        setting: models, texts and hardware.
        source: the arXiv number with table, figure or section; or the leaderboard.
    """

    speedup: str
    length: str
    setting: str
    source: str


@dataclass(frozen=True, kw_only=True)
class System:
    """A system of the literature.

    Attributes:
        key: names the row in the record and for `--row`.
        name: in the table.
        paper: arXiv number; "" for what has none.
        command: runs the system, from the root of the checkout; a prompt and other options may follow.
        rule: see `RULES`. An exact system is compared with plain decoding; one that is exact in distribution is
            compared when greedy only.
        published: see there.
        differs: what differs from the published system, in words.
        needs: beside the target, in words; "" for nothing.
        before: the command that makes what the command needs, where that is in no checkout.
        made_here: whether that takes seconds, so that the measurement runs it.
        prompts: see `TEXT`.
        elsewhere: why the row is not measured in this run, and where figures are; "" where it is measured.
    """

    key: str
    name: str
    paper: str
    command: str
    rule: str
    published: Published
    differs: str
    needs: str = ""
    before: str = ""
    made_here: bool = False
    prompts: str = TEXT
    elsewhere: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def with_folders(self, folders: Mapping[str, Path]) -> str:
        """The command with the folders that a user has in place of those that it names, such as "build/heads"."""
        return BUILT.sub(lambda found: _moved(found[0], folders), self.command)

    def missing(self, folders: Mapping[str, Path]) -> list[str]:
        """The paths that the command needs and that do not exist."""
        moved = (_moved(path, folders) for path in BUILT.findall(self.command))
        return [path for path in moved if not Path(path).exists()]


@dataclass(frozen=True)
class Parsed:
    """A command of `leapahead generate`, as the program reads it.

    Attributes:
        model: what `models.loading.load` is given; without a name it loads the bundled one.
        configuration: drafter, options and acceptance rule.
    """

    model: dict[str, Any]
    configuration: Configuration


def parsed(command: str) -> Parsed:
    """What a row's command says, by the program's own parser.

    Raises:
        ValueError: it is no command of `leapahead generate`.
        ClickException, BadParameter: the program would refuse it.
    """
    words = shlex.split(command)
    if words[: len(PROGRAM)] != PROGRAM:
        raise ValueError(f"{command!r} does not begin with {' '.join(PROGRAM)}")
    with generate.make_context("generate", words[len(PROGRAM) :]) as context:
        values = dict(context.params)
    drafter = values.pop("drafter")
    options = drafter_arguments(values, [drafter])
    relaxed = rule(values.pop("acceptance"))
    return Parsed(model_arguments(values), Configuration(drafter, options, relaxed))


def _moved(path: str, folders: Mapping[str, Path]) -> str:
    for name, folder in folders.items():
        if path == name or path.startswith(f"{name}/"):
            return f"{folder}{path[len(name) :]}"
    return path
