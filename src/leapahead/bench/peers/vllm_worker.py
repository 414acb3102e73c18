"""A program that runs in vLLM's own environment and serves its engine by lines of JSON. Imports nothing of leapahead.

    {"model", "dtype", "max_model_len", "speculative", "eager", "additional"}
                                                         ->  {"device", "max_model_len", "max_num_seqs"}
    {"prompts", "limits", "ends"}, "predictions" too, many times
                                                         ->  {"texts", "steps", "seconds", "prefill", "memory"}
    {"forget": true}, before a round                    ->  {}
    on an error                                          ->  {"error"}, and the program ends

The prefill ends when every sequence has its first token; what follows is timed. A long prompt may take several steps
while other sequences are decoded already; those steps and their tokens count as prefill.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from time import perf_counter
from typing import Any


class Worker:
    """A loaded engine.

    Args:
        request: the first line.
    """

    def __init__(self, request: dict[str, Any]) -> None:
        self._vllm = vllm = import_module("vllm")
        self._engine = vllm.LLMEngine.from_engine_args(
            vllm.EngineArgs(
                model=request["model"],
                dtype=request["dtype"],
                max_model_len=request["max_model_len"],
                speculative_config=request["speculative"],
                enforce_eager=request["eager"],
                additional_config=request.get("additional", {}),
                seed=0,
                skip_tokenizer_init=True,
                enable_prefix_caching=False,  # a second pass would be cheaper than the first
                generation_config="vllm",  # not the model's own, which may have penalties
                disable_log_stats=True,
            )
        )
        config = self._engine.vllm_config
        self.settings = {
            "device": import_module("vllm.platforms").current_platform.device_type,
            "max_model_len": config.model_config.max_model_len,
            "max_num_seqs": config.scheduler_config.max_num_seqs,
        }
        self._passes = 0
        self._scheduled: list[dict[str, int]] = []
        self._watch()

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """Decodes all prompts of a line together."""
        deltas = import_module("vllm.sampling_params").RequestOutputKind.DELTA
        self._passes += 1
        texts: list[dict[str, Any]] = [
            {"tokens": [], "first_token": 0.0, "timed": 0, "steps": 0, "nodes": 0, "accepted": []}
            for _ in request["prompts"]
        ]
        engine, ids = self._engine, dict[str, int]()
        predictions = request.get("predictions") or [()] * len(request["prompts"])
        began = perf_counter()
        for index, (prompt, limit) in enumerate(zip(request["prompts"], request["limits"], strict=True)):
            params = self._vllm.SamplingParams(
                temperature=0.0,
                max_tokens=limit,
                stop_token_ids=request["ends"],
                ignore_eos=True,  # of the model's files; the ends are given instead
                detokenize=False,
                output_kind=deltas,
                **({"extra_args": {"prediction": predictions[index]}} if predictions[index] else {}),
            )
            name = f"{self._passes}-{index}"
            ids[name] = index
            inner = engine.add_request(name, {"prompt_token_ids": prompt}, params)
            ids[inner or name] = index
        first, steps = 0.0, 0  # `steps` counts those of the prefill
        while engine.has_unfinished_requests():
            self._scheduled.clear()
            outputs = engine.step()
            now = perf_counter()
            steps += not first
            for output in outputs:
                text = texts[ids[output.request_id]]
                new = [token for each in output.outputs for token in each.token_ids]
                if not new:
                    continue
                text["first_token"] = text["first_token"] or now - began
                text["tokens"] += new
                if first:
                    text["timed"] += len(new)
                    text["steps"] += 1
                    accepted = text["accepted"]  # by position: all tokens of a step but its last one were drafted
                    accepted += [0] * (len(new) - 1 - len(accepted))
                    for position in range(len(new) - 1):
                        accepted[position] += 1
            if first:
                for scheduled in self._scheduled:
                    for name, nodes in scheduled.items():
                        texts[ids[name]]["nodes"] += nodes
            elif all(text["tokens"] for text in texts):
                first = now
        ended = perf_counter()
        return {
            "texts": texts,
            "steps": steps,
            "seconds": ended - first,
            "prefill": first - began,
            "memory": peak_mib(),
        }

    def forget(self) -> None:
        """Drops the texts of earlier requests: of leapahead's proposer, or of vLLM's suffix decoding, made anew."""
        runner: Any = self._engine
        for name in ("engine_core", "engine_core", "model_executor", "driver_worker", "worker", "model_runner"):
            runner = getattr(runner, name, None)
        drafter: Any = getattr(runner, "drafter", None)
        if drafter is None:
            return
        if (forget := getattr(drafter, "forget", None)) is not None:
            forget()
        else:
            drafter.__init__(self._engine.vllm_config)

    def _watch(self) -> None:
        """Records how many tokens of each sequence every step reads (one and its drafts), where vLLM shows them."""
        scheduler: Any = self._engine
        for name in ("engine_core", "engine_core", "scheduler"):
            scheduler = getattr(scheduler, name, None)
        schedule = getattr(scheduler, "schedule", None)
        if schedule is None:
            return

        def watched(*args: Any, **kwargs: Any) -> Any:
            found = schedule(*args, **kwargs)
            self._scheduled.append(dict(getattr(found, "num_scheduled_tokens", {})))
            return found

        scheduler.schedule = watched


def peak_mib() -> float:
    """Peak memory of this process in MiB; all of vLLM runs in it."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def main() -> int:
    """Serves requests from stdin until it ends."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [
        each for each in sys.path if os.path.abspath(each) != here
    ]  # so that `import vllm` does not find the file vllm.py here
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)  # logs go to stderr

    def send(what: dict[str, Any]) -> None:
        print(json.dumps(what), file=answers, flush=True)

    try:
        worker = Worker(json.loads(requests.readline()))
        send(worker.settings)
        for line in requests:
            request = json.loads(line)
            if "forget" in request:
                worker.forget()
                send({})
            else:
                send(worker.run(request))
    except Exception as error:
        send({"error": f"{type(error).__name__}: {error}"})
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
