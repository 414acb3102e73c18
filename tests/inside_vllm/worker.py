"""Runs vLLM in a process of its own: one engine, and calls of it, from a JSON file to a JSON file.

    python worker.py JOB RESULT     JOB: {"engine": {...}, "calls": [{"name", "prompts", "params": [...]}, ...]}

A call's prompts run together. With "abort": N, request N of it is aborted after a few steps.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

for name, value in {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "OMP_NUM_THREADS": "1",  # the model is small
}.items():
    os.environ.setdefault(name, value)


def params_of(given: dict[str, Any]) -> Any:
    import vllm
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    options = dict(given)
    if form := options.pop("form", None):
        options["structured_outputs"] = StructuredOutputsParams(**form)
    kind = RequestOutputKind.FINAL_ONLY  # the texts of n > 1 together
    return vllm.SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "output_kind": kind, **options})


def called(engine: Any, call: dict[str, Any], count: int) -> list[Any]:
    """The texts of a call: token ids, or a list of them for n > 1; None for an aborted request."""
    found: dict[str, Any] = {}
    for index, (prompt, params) in enumerate(zip(call["prompts"], call["params"], strict=True)):
        content = {"prompt_token_ids": prompt} if isinstance(prompt, list) else prompt
        engine.add_request(f"{count}-{index}", content, params_of(params))
        found[f"{count}-{index}"] = None
    steps = 0
    while engine.has_unfinished_requests():
        steps += 1
        if steps == 6 and "abort" in call:
            engine.abort_request([f"{count}-{call['abort']}"])
        for output in engine.step():
            if output.finished:
                texts = [list(each.token_ids) for each in output.outputs]
                found[output.request_id] = texts if len(texts) > 1 else texts[0]
    return list(found.values())


def main() -> None:
    import vllm

    job = json.loads(Path(sys.argv[1]).read_text())
    given = {
        "dtype": "float32",
        "max_model_len": 512,
        "enforce_eager": True,
        "seed": 0,
        "generation_config": "vllm",
        "disable_log_stats": False,
        **job["engine"],
    }
    engine = vllm.LLMEngine.from_engine_args(vllm.EngineArgs(**given))
    result: dict[str, Any] = {"texts": {}, "accepted": {}}
    runner = engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    figures = getattr(getattr(runner, "drafter", None), "figures", None)

    def accepted() -> dict[str, int]:
        return dict(figures.accepted) if figures is not None else {}

    for count, call in enumerate(job["calls"]):
        before = accepted()
        result["texts"][call["name"]] = called(engine, call, count)
        after = accepted()
        result["accepted"][call["name"]] = {each: n - before.get(each, 0) for each, n in after.items()}
    if figures is not None:
        result |= {"errors": figures.errors, "resynchronised": figures.resynchronised, "figures": str(figures)}
    preempted = [each.value for each in engine.get_metrics() if each.name == "vllm:num_preemptions"]
    result["preemptions"] = preempted[0] if preempted else 0
    from prometheus_client import REGISTRY

    result["metric"] = REGISTRY.get_sample_value("leapahead:drafting_seconds_total")
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
