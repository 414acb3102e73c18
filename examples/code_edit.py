"""Generate a method again after its class was edited: the old version of the method is the prediction.

Run it with `python examples/code_edit.py`.

The text is the same with and without the prediction. Only the number of forwards differs.
"""

from leapahead import LLM

CLASS = '''class Reader:
    """Reads lines from a file."""

    def __init__(self, file):
        self.file = file

    def readline(self, size=-1):
'''


def main() -> None:
    # Without a drafter cache, the second text cannot be drafted from the first one except by the prediction.
    with LLM(drafter_cache=False) as llm:
        old = llm.generate(CLASS, max_new_tokens=64)
        edited = CLASS.replace("file", "stream")
        without = llm.generate(edited, max_new_tokens=64)
        new = llm.generate(edited, max_new_tokens=64, prediction=old.text)
    assert new.text == without.text
    print(new.text)
    for name, result in (("without", without), ("with", new)):
        print(f"{name} the prediction: {len(result.tokens)} tokens in {result.stats.steps} forwards")


if __name__ == "__main__":
    main()
