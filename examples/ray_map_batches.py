"""Complete the prompts of a data set with Ray, in two processes that exchange what their drafters learned.

Run it with `python examples/ray_map_batches.py`. It needs the extra `ray`.
"""

import ray

from leapahead.integrations.ray import Generate, drafter_cache_actor

PROMPTS = [
    "import os\nimport sys\n\ndef main(argv):\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "",  # ends with a sentence in the column `error`; the others go on
    "def fibonacci(n):\n",
]


def main() -> None:
    ray.init(include_dashboard=False)
    rows = [{"row_id": n, "prompt": PROMPTS[n % len(PROMPTS)]} for n in range(12)]
    exchange = drafter_cache_actor()
    job = ray.data.from_items(rows).map_batches(
        Generate,
        fn_constructor_kwargs={
            "llm": {"max_batch": 4},
            "seed": 1,
            "temperature": 0.7,
            "max_new_tokens": 48,
            "exchange": exchange,
            "exchange_every": 1,
        },
        batch_size=2,
        concurrency=2,
        num_cpus=1,
    )
    for row in sorted(job.take_all(), key=lambda row: row["row_id"]):
        print(row["row_id"], repr(row["error"] or row["text"]), f"{row['acceptance_length']:.2f} tokens a step")
    print(ray.get(exchange.figures.remote()))


if __name__ == "__main__":
    main()
