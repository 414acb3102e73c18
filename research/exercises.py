"""`python -m research exercises`: prompts in the form of programming exercises, to distil draft models on.

    from typing import List          a line of imports in some

    def name(a, b=1):                the signature of a function
        \"\"\" What it does.            the first paragraph of its docstring
        >>> name(3, 4)               up to three of the docstring's examples
        7
        \"\"\"

They are made of functions that are no methods and whose docstrings hold examples, of Python's standard library and of
packages that torch needs. None of HumanEval's prompts is among them; those are only evaluated.
"""

from __future__ import annotations

import ast
import doctest
import json
import random
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from leapahead.cli.command import Command
from leapahead.cli.screen import write_file
from leapahead.core.errors import BadParameter
from research.train.data import stdlib_folder

PACKAGES = ("networkx", "numpy", "sympy")
CHARACTERS = (60, 900)  # of a prompt
SIGNATURE, PARAGRAPH, EXAMPLE = 110, 400, 160  # the most characters of each
EXAMPLES = 3  # of a docstring, at most
IMPORTS = ("", "", "", "\n\n", "from typing import List\n\n\n", "import math\n\n\n")
METHODS = ("self", "cls")


@click.command(name="exercises", cls=Command)
@click.option("--count", type=click.IntRange(min=1), default=3000, show_default=True, help="The most prompts.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the choice and of the forms.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="File of JSON lines.")
def main(count: int, seed: int, out: Path) -> None:
    """Write prompts for `leapahead train-draft`: functions whose docstrings hold examples."""
    found = prompts(count, seed)
    write_file(out, "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in found))
    click.echo(f"{out}: {len(found)} prompts")


def prompts(count: int, seed: int) -> list[dict[str, Any]]:
    """Prompts in a random order, as many as there are up to `count`.

    Raises:
        BadParameter: a package is not installed.
    """
    draw = random.Random(seed)
    found: dict[str, None] = {}
    for folder in _folders():
        for source in _sources(folder):
            found |= dict.fromkeys(exercises(source, draw))
    chosen = draw.sample(list(found), min(count, len(found)))
    return [{"prompt": prompt} for prompt in chosen]


def exercises(source: str, draw: random.Random) -> Iterator[str]:
    """The prompts that a Python file gives, in a form that is drawn for each.

    Args:
        source: the file's text.
        draw: gives the forms.
    """
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef) or any(each.arg in METHODS for each in node.args.args[:1]):
            continue
        if (signature := _signature(node)) and (docstring := ast.get_docstring(node)):
            body = _docstring(docstring, node.name, draw)
            prompt = f"{draw.choice(IMPORTS)}{signature}\n{body}"
            if body and CHARACTERS[0] <= len(prompt) <= CHARACTERS[1]:
                yield prompt


def _signature(node: ast.FunctionDef) -> str:
    """The line of a definition without decorators, "" if it is too long."""
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    line = f"def {node.name.lstrip('_')}({ast.unparse(node.args)}){returns}:"
    return line if len(line) <= SIGNATURE else ""


def _docstring(docstring: str, name: str, draw: random.Random) -> str:
    """The indented docstring of a prompt, "" if the function's own has no example that calls it."""
    try:
        parsed = doctest.DocTestParser().get_examples(docstring)
    except ValueError:
        return ""
    shown = [
        (example.source.partition("# doctest")[0].strip(), example.want.strip())
        for example in parsed
        if f"{name}(" in example.source and example.want and len(example.source + example.want) <= EXAMPLE
    ][:EXAMPLES]
    paragraph = docstring.strip().split("\n\n")[0]
    if not shown or '"""' in paragraph or "\\" in paragraph or len(paragraph) > PARAGRAPH:
        return ""
    lines, form = paragraph.splitlines(), draw.choice(("doctest", "doctest", "Example:", "For example:"))
    if form == "doctest":
        for call, result in shown:
            lines += [f">>> {call.splitlines()[0]}", *(f"... {more}" for more in call.splitlines()[1:])]
            lines += result.splitlines()
    else:
        sign = draw.choice(("=>", "==", "returns"))
        lines += [form, *(f"{call} {sign} {result}" for call, result in shown)]
    lines = [line for text in lines for line in text.splitlines()]
    indented = "".join(f"    {line}\n" if line.strip() else "\n" for line in lines).removeprefix("    ")
    return f'    """{draw.choice(("", " ", chr(10) + "    "))}{indented}    """\n'


def _folders() -> Iterator[Path]:
    """The folders of the sources."""
    yield stdlib_folder()
    for name in PACKAGES:
        spec = find_spec(name)
        if spec is None or spec.origin is None:
            raise BadParameter(f"the package {name} is not installed; install torch, which needs it")
        yield Path(spec.origin).parent


def _sources(folder: Path) -> Iterator[str]:
    """The text of every Python file, in a fixed order; those that cannot be parsed are left out."""
    for path in sorted(folder.rglob("*.py")):
        if "site-packages" in path.relative_to(folder).parts:
            continue
        try:
            source = path.read_text(encoding="utf-8").expandtabs(8)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                ast.parse(source)
        except (SyntaxError, ValueError, OSError):
            continue
        yield source
