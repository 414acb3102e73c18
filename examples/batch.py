"""Complete several prompts together: greedily, and then two samples of each, which share the prompt's prefill.

Run it with `python examples/batch.py`.
"""

from leapahead import LLM

PROMPTS = [
    '''class Options:
    def set_name(self, name):
        """Set the name of the option."""
        self.name = name

    def set_value(self, value):
''',
    '''class Message:
    @property
    def sender(self):
        """The sender of the message."""
        return self._sender

    @property
    def subject(self):
''',
    '''class Reader:
    """Reads lines from a file."""

    def __init__(self, file):
        self.file = file

    def readline(self, size=-1):
''',
]


def main() -> None:
    with LLM(max_batch=4) as llm:
        for prompt, result in zip(PROMPTS, llm.generate(PROMPTS, max_new_tokens=48), strict=True):
            print(f"{prompt}{result.text}\n# {len(result.tokens)} tokens in {result.stats.steps} forwards\n")
        for samples in llm.generate(PROMPTS, max_new_tokens=48, temperature=0.8, seed=1, n=2):
            print([sample.text for sample in samples])


if __name__ == "__main__":
    main()
