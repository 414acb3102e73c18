"""Prompts for `check` and the demo: the bundled set, and the reader of a user's file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from leapahead.core.errors import BadParameter

DEMO = '''class Stack:
    """A last-in, first-out stack."""

    def __init__(self):
        self.items = []

    def push(self, item):
        """Put an item on top of the stack."""
        self.items.append(item)

    def pop(self):
        """Remove the item on top of the stack and return it."""
'''

BUNDLED = (
    'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n',
    "import os\n\n\ndef list_files(folder):\n    result = []\n    for name in os.listdir(folder):\n",
    'class Account:\n    """A bank account with an owner and a balance."""\n\n    def __init__(self, owner):\n',
    'def is_prime(n: int) -> bool:\n    """Tell whether n is prime.\n\n    >>> is_prime(7)\n    True\n    """\n',
    DEMO,
    "SELECT name, price FROM products WHERE price > 10 ORDER BY",
    "A train leaves at nine and drives 60 miles an hour for three hours, then 40 miles an hour for two hours. "
    "How far does it drive?",
    "Tom has 12 apples. He gives a third of them to Anna and buys 5 more. How many apples does Tom have now?",
    "The sum of the first ten odd numbers is computed as follows:\n1 + 3 = 4\n4 + 5 = 9\n",
    "If 3x + 7 = 22, then",
    "The old lighthouse stood at the end of the road, and every evening its keeper",
    "Dear Ms Weber,\n\nthank you for your letter of last week. ",
    "Water boils at a lower temperature on a mountain than at the sea because",
    "Write a list of five things to check before a long journey:\n1.",
)

FIELDS = ("prompt", "question", "turns")


def read(path: Path) -> list[str]:
    """The prompts of a file: .jsonl with a field `prompt`, `question` or `turns` (its first), else one a line.

    Raises:
        BadParameter: the file cannot be read, or a line holds no prompt.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # not splitlines: JSON strings may hold U+2028
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise BadParameter(f"{path} cannot be read: {reason}") from None
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if path.suffix.lower() in (".jsonl", ".json"):
        prompts = [_field(line, f"{path}, line {number}") for number, line in numbered]
    else:
        prompts = [line.rstrip("\r") for _, line in numbered]
    if not prompts:
        raise BadParameter(f"{path} holds no prompts")
    return prompts


def _field(line: str, where: str) -> str:
    try:
        record: Any = json.loads(line)
    except json.JSONDecodeError:
        raise BadParameter(f"{where} is not JSON") from None
    for name in FIELDS if isinstance(record, dict) else ():
        if name in record:
            value = record[name]
            if isinstance(value, list):
                value = value[0] if value else ""
            if not isinstance(value, str) or not value:
                raise BadParameter(f"{where}: the field {name!r} is not text")
            return value
    raise BadParameter(f"{where} has none of the fields {', '.join(FIELDS)}")
