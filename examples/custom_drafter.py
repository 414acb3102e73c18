"""A drafter that counts which token followed which, and drafts a chain of the likeliest successors.

Run it with `python examples/custom_drafter.py`.
"""

from collections import Counter, defaultdict
from math import log

from leapahead import LLM, Budget, Proposal, SequenceDrafter, SequenceView, TokenTree


class Bigram(SequenceDrafter):
    """Drafts the tokens that followed most often.

    Args:
        length: number of tokens to draft.
    """

    name = "bigram"
    needs = frozenset({"chain"})  # several tokens of one path in one forward

    def __init__(self, length: int = 4) -> None:
        self.length = length
        self.successors: defaultdict[int, Counter[int]] = defaultdict(Counter)
        self.counted = 1  # tokens of the sequence whose predecessor has been counted

    def propose(self, sequence: SequenceView, budget: Budget) -> Proposal:
        tokens = sequence.tokens
        for index in range(self.counted, len(tokens)):
            self.successors[tokens[index - 1]][tokens[index]] += 1
        self.counted = len(tokens)
        draft: list[int] = []
        token = sequence.root
        while len(draft) < min(self.length, budget.depth, budget.nodes) and self.successors[token]:
            candidates, counts = zip(*self.successors[token].most_common(), strict=True)
            order = sequence.rank(len(tokens) + len(draft), candidates, [log(count) for count in counts])
            token = candidates[order[0]]
            draft.append(token)
        return Proposal(TokenTree.chain(sequence.root, draft))


PROMPT = '''class Options:
    def set_name(self, name):
        """Set the name of the option."""
        self.name = name

    def set_value(self, value):
'''


def main() -> None:
    with LLM(drafter=Bigram, length=3) as llm:
        result = llm.generate(PROMPT, max_new_tokens=48)
        plain = llm.generate(PROMPT, max_new_tokens=48, drafter="plain")
    assert result.text == plain.text
    print(result.text)
    print(f"{len(result.tokens)} tokens in {result.stats.steps} forwards; plain decoding needs {plain.stats.steps}")


if __name__ == "__main__":
    main()
