"""The prompts in the form of programming exercises."""

from __future__ import annotations

import random

from research.exercises import CHARACTERS, EXAMPLES, exercises

SOURCE = '''
import math

@decorated
def doubled(numbers: list[int], times=2) -> list[int]:
    """Multiplies every number.

    More that is not shown.

    >>> doubled([1, 2])  # doctest: +SKIP
    [2, 4]
    >>> doubled([3])
    [6]
    >>> other(3)
    9
    """
    return [times * number for number in numbers]

class Holder:
    def held(self):
        """Gives it.

        >>> held()
        1
        """
        return 1

def undocumented(numbers):
    return numbers

def without_examples(numbers):
    """Returns what it is given, and no example is here."""
    return numbers
'''


def test_functions_with_examples_make_prompts() -> None:
    forms = {form for seed in range(40) for form in exercises(SOURCE, random.Random(seed))}
    assert all(
        form.count("def ") == 1 and "def doubled(numbers: list[int], times=2) -> list[int]:\n" in form for form in forms
    )
    assert all("Multiplies every number." in form and "not shown" not in form for form in forms)
    assert all(CHARACTERS[0] <= len(form) <= CHARACTERS[1] for form in forms)
    assert all("# doctest" not in form and "other(3)" not in form for form in forms)
    assert any(
        form.endswith('    >>> doubled([1, 2])\n    [2, 4]\n    >>> doubled([3])\n    [6]\n    """\n') for form in forms
    )
    assert any("    Example:\n    doubled([1, 2]) => [2, 4]\n" in form for form in forms)
    assert all(compile(form + "    return 1\n", "form", "exec") for form in forms)


def test_no_more_examples_than_the_limit() -> None:
    calls = "".join(f"    >>> f({number})\n    {number}\n" for number in range(9))
    source = f'def f(x):\n    """Returns the number that it is given, as it is.\n\n{calls}    """\n    return x\n'
    (form,) = exercises(source, random.Random(0))
    assert form.count("f(") == EXAMPLES + 1
