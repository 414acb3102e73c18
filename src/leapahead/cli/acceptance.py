"""The option --acceptance, by which a relaxed rule is chosen."""

from __future__ import annotations

from typing import Any

import click

from leapahead.cli.command import option
from leapahead.cli.options import DRAFTER_GROUP, Option
from leapahead.core.errors import BadParameter
from leapahead.core.relaxed import EXACT, RULES

SPELLED = f"{EXACT}, or {', '.join(RULES)} with parameters such as lossy-typical:epsilon=0.09,delta=0.3"
ACCEPTANCE: tuple[Option, ...] = (
    option(
        "--acceptance",
        default=EXACT,
        metavar="RULE",
        group=DRAFTER_GROUP,
        help=f"{SPELLED}. A lossy rule accepts tokens that the target would not have chosen, so the text is another.",
    ),
)


def _refuse(_: click.Context, __: click.Parameter, given: Any) -> None:
    if given != EXACT:
        raise BadParameter(
            f"--acceptance={given} cannot be checked: a lossy rule gives another text than plain decoding by design; "
            "`leapahead bench --acceptance` counts the texts that differ"
        )


REFUSED: tuple[Option, ...] = (
    option(
        "--acceptance",
        default=EXACT,
        metavar="RULE",
        group=DRAFTER_GROUP,
        callback=_refuse,
        expose_value=False,
        help="A lossy rule is refused: its text differs from plain decoding's by design.",
    ),
)
