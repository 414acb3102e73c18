"""The bundled prompts of `check` and the demo."""

from __future__ import annotations

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
