"""Plain decoding by others: Transformers' static cache with its compiled forward, and vLLM."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from leapahead.bench.conditions import Data
from leapahead.core.errors import Refused
from research.gpu.lab import Lab
from research.gpu.timing import Clock

WORKER = Path(__file__).with_name("vllm_worker.py")


class Stopwatch(StoppingCriteria):  # type: ignore[misc]
    """Notes when each token is there, and ends nothing."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        input_ids[0, -1].item()  # waits for the device
        self.times.append(perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def transformers_static(lab: Lab, prompt: Sequence[int]) -> Data:
    """`generate(cache_implementation="static")`, the second time: the first one compiles on CUDA."""
    model, tokens = lab.model, lab.settings.max_new_tokens
    given = torch.tensor([prompt], device=lab.device)
    options: dict[str, Any] = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
    passes: list[list[float]] = []
    began = perf_counter()
    for _ in range(2):
        watch = Stopwatch()
        criteria = StoppingCriteriaList([watch])
        model.generate(given, cache_implementation="static", stopping_criteria=criteria, **options)
        passes.append(watch.times)
    times = passes[1]
    return {
        "tokens": len(times),
        "tokens_per_second": (len(times) - 1) / (times[-1] - times[0]),
        "compiled": lab.device.type == "cuda",
        "first_pass_seconds": passes[0][-1] - began,
    }


def vllm(lab: Lab, prompt: Sequence[int], clock: Clock) -> Data:
    """vLLM's plain decoding of a model of the same shapes, whose weights it makes itself.

    Raises:
        Refused: it is not installed, it failed, or it took too long.
    """
    python = lab.settings.vllm_python or (sys.executable if find_spec("vllm") else "")
    if not python:
        raise Refused("vLLM is not installed here; name the Python of an environment that has it by --vllm-python")
    with tempfile.TemporaryDirectory() as folder:
        lab.model.config.save_pretrained(folder)
        asked = {
            "model": folder,
            "dtype": lab.settings.dtype,
            "prompt": list(prompt),
            "tokens": lab.settings.max_new_tokens,
        }
        lab.release()  # vLLM takes the device's memory
        try:
            done = subprocess.run(
                [python, str(WORKER), json.dumps(asked)],
                capture_output=True,
                text=True,
                check=False,
                timeout=max(0.1, clock.left),
            )
        except subprocess.TimeoutExpired:
            raise Refused("vLLM did not answer in the time that was left; give the run more --minutes") from None
        except OSError as error:
            raise Refused(f"--vllm-python {python} cannot be run: {error.strerror or error}") from None
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["it gave no reason"]
        raise Refused(f"vLLM ended with an error: {last[0][:300]}")
    answers = [line for line in done.stdout.splitlines() if line.startswith('{"tokens"')]  # between lines of its log
    if not answers:
        raise Refused("vLLM ended without an answer")
    found: Data = json.loads(answers[-1])
    return found
