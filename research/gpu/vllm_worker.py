"""Runs in an environment with vLLM: plain decoding of one prompt, timed. Prints one line of JSON.

The argument is JSON: `model`, a folder with config.json; `dtype`; `prompt`, token ids; `tokens`, how many new ones.
Weights are made by vLLM (`load_format="dummy"`), since the time of a forward does not depend on their values.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from time import perf_counter
from typing import Any


def main(asked: dict[str, Any]) -> dict[str, Any]:
    """The time of a text less that of half of it, which leaves out the prompt."""
    vllm: Any = import_module("vllm")

    llm = vllm.LLM(
        model=asked["model"],
        dtype=asked["dtype"],
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=len(asked["prompt"]) + asked["tokens"] + 1,
        max_num_seqs=1,
        enable_prefix_caching=False,
    )

    def seconds(tokens: int) -> float:
        params = vllm.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        began = perf_counter()
        llm.generate([{"prompt_token_ids": asked["prompt"]}], params, use_tqdm=False)
        return perf_counter() - began

    whole, half = asked["tokens"], asked["tokens"] // 2
    seconds(whole)  # warms up
    spent = min(seconds(whole) for _ in range(3)) - min(seconds(half) for _ in range(3))
    return {"tokens": whole - half, "tokens_per_second": (whole - half) / spent, "version": vllm.__version__}


if __name__ == "__main__":
    sys.path.pop(0)  # the folder of this file, so that nothing in it is found in place of a package
    print(json.dumps(main(json.loads(sys.argv[1]))))
