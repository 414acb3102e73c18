"""A process that measures one GGUF file under one build of llama.cpp, in rounds that `research.curve` asks for.

    a line of JSON {"file", "options", "context", "sizes", "repeats"}   ->   {"build", "type", "threads"}
    each further line                                                   ->   {"milliseconds": {n: [...]}, "prompt"}
    on an error                                                         ->   {"error"}, and the process ends

It takes the llama_cpp that its search path has, whatever the build.
"""

from __future__ import annotations

import json
import sys
from contextlib import closing
from random import Random
from time import perf_counter
from typing import Any

from leapahead.bench.conditions import describe
from leapahead.core.errors import LeapaheadError
from leapahead.core.sampling import SamplingParams
from leapahead.core.tree import TokenTree
from leapahead.models.base import read_prompt
from leapahead.models.llama_cpp.context import build
from leapahead.models.llama_cpp.model import LlamaCppTarget, load
from leapahead.models.llama_cpp.options import LlamaCppOptions


def one_round(target: LlamaCppTarget, asked: dict[str, Any], random: Random) -> dict[str, Any]:
    """Reads a prompt, then runs forwards over chains of every size, in a random order. Nothing is committed.

    The first forward of each size is not counted, since llama.cpp prepares its graph anew when the size changes.

    Returns:
        milliseconds by size, and tokens of the prompt per second.
    """
    context, found = asked["context"], dict[str, list[float]]()
    tokens = [(1 + 7 * index) % target.info.vocab_size for index in range(context + max(asked["sizes"]))]
    target.forget()
    with target.lock, closing(target.open(tokens[:context], SamplingParams())) as session:
        began = perf_counter()
        read_prompt(target, session)
        prompt = (context - 1) / (perf_counter() - began)
        for size in random.sample(asked["sizes"], len(asked["sizes"])):
            tree = TokenTree.chain(tokens[context - 1], tokens[context : context + size - 1])
            times = []
            for _ in range(1 + asked["repeats"]):
                began = perf_counter()
                _ = target.step([session], [tree])[0][0]
                times.append(1e3 * (perf_counter() - began))
            found[str(size)] = times[1:]
    return {"milliseconds": found, "prompt": prompt}


def main() -> None:
    """Serves until the input ends."""
    asked = json.loads(sys.stdin.readline())
    try:
        options = LlamaCppOptions(n_ctx=asked["context"] + 512, **asked["options"])
        target, _ = load(asked["file"], options)
        described = describe(target)
        _say({"build": build(), "type": described["dtype"], "threads": described["threads"]})
        random = Random(0)
        for _ in sys.stdin:
            _say(one_round(target, asked, random))
    except LeapaheadError as error:
        _say({"error": str(error)})


def _say(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
