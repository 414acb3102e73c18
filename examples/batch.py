"""Complete several prompts together: greedily, and then two samples of each, which share the prompt's prefill.

Run it with `python examples/batch.py`.
"""

from leapahead import LLM

PROMPTS = ["def read_lines(filename):\n", "class Stack:\n    def push(self, item):\n", "import argparse\n"]


def main() -> None:
    with LLM(max_batch=4) as llm:
        for prompt, result in zip(PROMPTS, llm.generate(PROMPTS, max_new_tokens=32), strict=True):
            print(f"{prompt}{result.text}\n-- {len(result.tokens)} tokens in {result.stats.steps} forwards\n")
        for samples in llm.generate(PROMPTS, max_new_tokens=32, temperature=0.8, seed=1, n=2):
            print([sample.text for sample in samples])


if __name__ == "__main__":
    main()
