"""Real Ray jobs with the bundled model (`make test-ray`): the same rows whatever the actors, the order or a crash."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray")
pytest.importorskip("ray.data")

from leapahead import LLM  # noqa: E402
from leapahead.drafters.cache import DrafterCache  # noqa: E402
from leapahead.drafters.sources.past_texts import PastTexts  # noqa: E402
from leapahead.integrations.ray import Generate, drafter_cache_actor, row_seed  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of Ray and what it imports
ROOT = Path(__file__).parents[1]

PROMPTS = [
    "def fibonacci(n):\n",
    "import os\nimport sys\n\ndef main(argv):\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "def read(path):\n    with open(path) as file:\n",
]
ROWS = [{"row_id": n, "prompt": PROMPTS[n % len(PROMPTS)]} for n in range(12)]
OPTIONS = {"max_new_tokens": 24, "seed": 5, "llm": {"max_batch": 4}}
RESULTS = ("text", "tokens", "finish_reason", "error")


@pytest.fixture(scope="module", autouse=True)
def cluster(cache_folder: Path) -> Iterator[None]:
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    path = [str(ROOT / "src"), str(ROOT / "tests")]
    ray.init(
        num_cpus=8,  # of which each actor asks for one, whatever the machine has
        include_dashboard=False,
        object_store_memory=200_000_000,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(path), "LEAPAHEAD_CACHE": str(cache_folder)}},
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def expected() -> dict[float, dict[int, tuple[Any, ...]]]:
    """Temperature -> the rows by plain decoding, one prompt at a time."""
    llm, found = LLM(drafter="plain"), dict[float, dict[int, tuple[Any, ...]]]()
    for temperature in (0.0, 0.8):
        found[temperature] = {}
        for row in ROWS:
            result = llm.generate(
                row["prompt"], max_new_tokens=24, temperature=temperature, seed=row_seed(5, row["row_id"])
            )
            found[temperature][row["row_id"]] = (result.text, result.tokens, result.finish_reason, "")
    return found


def run(
    rows: Sequence[dict[str, Any]], kind: type = Generate, actors: int = 1, batch: int = 3, **options: Any
) -> list[dict[str, Any]]:
    data = ray.data.from_items(list(rows)).repartition(min(4, len(rows)))
    job = data.map_batches(
        kind, fn_constructor_kwargs={**OPTIONS, **options}, batch_size=batch, concurrency=actors, num_cpus=1
    )
    return job.take_all()


def table(rows: Sequence[dict[str, Any]]) -> dict[int, tuple[Any, ...]]:
    assert len({row["row_id"] for row in rows}) == len(rows)
    return {row["row_id"]: (row["text"], list(row["tokens"]), row["finish_reason"], row["error"]) for row in rows}


@pytest.mark.parametrize(("actors", "batch", "temperature"), [(1, 12, 0.8), (2, 3, 0.8), (4, 1, 0.8), (2, 2, 0.0)])
def test_any_number_of_actors_and_any_order_give_the_same_rows(
    expected: Any, actors: int, batch: int, temperature: float
) -> None:
    rows = random.Random(actors).sample(ROWS, len(ROWS))
    assert table(run(rows, actors=actors, batch=batch, temperature=temperature)) == expected[temperature]


class Killed(Generate):
    """Its process is killed after the first batch that has the row, once, when the texts are there but not given on."""

    def __init__(self, marker: str, **options: Any) -> None:
        super().__init__(**options)
        self.marker = Path(marker)

    def __call__(self, batch: Any) -> dict[str, Any]:
        found = super().__call__(batch)
        if 7 in batch["row_id"] and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return found


def test_an_actor_that_is_killed_half_way_is_retried_to_the_same_rows(expected: Any, tmp_path: Path) -> None:
    marker = tmp_path / "killed"
    exchange = drafter_cache_actor("killed")
    found = run(ROWS, Killed, 2, marker=str(marker), temperature=0.8, exchange=exchange, exchange_every=1)
    assert marker.exists()
    assert table(found) == expected[0.8]


def acceptance(rows: Sequence[dict[str, Any]]) -> float:
    return sum(row["acceptance_length"] for row in rows) / len(rows)


def test_a_replica_drafts_from_what_another_one_has_seen(expected: Any, tmp_path: Path) -> None:
    """Each job has a new replica. Its drafter cache is bounded, and can be saved for later jobs."""
    exchange = drafter_cache_actor("shared")
    assert drafter_cache_actor("shared") == exchange
    seen = {"llm": {"drafter": "suffix"}, "exchange": exchange, "exchange_every": 1, "batch": 1}
    rows = ROWS[:4]  # each prompt once
    first, second = run(rows, **seen), run(rows, **seen)
    alone = run(rows, llm={"drafter": "suffix"}, batch=1)
    assert table(first) == table(second) == table(alone) == {n: expected[0.0][n] for n in range(4)}
    assert acceptance(second) > 1.3 * acceptance(alone)
    assert acceptance(second) > 1.3 * acceptance(first)
    figures = ray.get(exchange.figures.remote())
    assert figures["exchanges"] >= 2
    assert 0 < figures["bytes"] < PastTexts.exchanged
    cache = DrafterCache()
    cache.merge_bytes(ray.get(exchange.state.remote()))
    assert cache.section("suffix", PastTexts).figures()["texts"] == 4
    file = ray.get(exchange.save.remote(str(tmp_path / "cache.npz")))
    later = run(rows, llm={"drafter": "suffix", "drafter_cache": file}, batch=1)
    assert acceptance(later) > 1.3 * acceptance(alone)
    assert table(later) == table(alone)


def test_a_later_job_finds_an_actor_that_outlives_its_job() -> None:
    cache = DrafterCache()
    cache.belong("some vocabulary", 32)
    exchange = drafter_cache_actor(lifetime="detached")
    ray.get(exchange.exchange.remote(cache.to_bytes()))
    code = (
        "import sys, ray; from leapahead.integrations.ray import drafter_cache_actor; ray.init(sys.argv[1])\n"
        "print(ray.get(drafter_cache_actor(lifetime='detached').figures.remote())['exchanges'])"
    )
    address = ray.get_runtime_context().gcs_address
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    job = [sys.executable, "-c", code, address]
    done = subprocess.run(job, capture_output=True, text=True, env=environment, check=False)
    ray.kill(exchange)
    assert done.stdout.splitlines()[-1:] == ["1"], done.stderr


def test_a_job_survives_the_death_of_the_actor(expected: Any) -> None:
    exchange = drafter_cache_actor("dead")
    ray.kill(exchange, no_restart=True)
    found = run(ROWS, actors=2, exchange=exchange, exchange_every=1)
    assert table(found) == expected[0.0]


def test_prompts_of_every_kind_and_bad_rows_go_through_arrow(tmp_path: Path) -> None:
    """Token ids, missing values, blocks in which every row failed, and a file of the results."""
    llm = LLM(drafter="plain")
    assert llm.tokenizer is not None
    ids = [llm.tokenizer.encode(prompt) for prompt in PROMPTS]
    rows = [
        {"row_id": n, "prompt": ids[n % 4] if n < 8 else [], "max_new_tokens": 7 if n % 2 else None} for n in range(12)
    ]
    data = ray.data.from_items(rows).repartition(6)
    job = data.map_batches(Generate, fn_constructor_kwargs=OPTIONS, batch_size=1, concurrency=1, num_cpus=1)
    job.write_parquet(str(tmp_path / "out"))
    found = table(ray.data.read_parquet(str(tmp_path / "out")).take_all())
    for n in range(8):
        plain = llm.generate(ids[n % 4], max_new_tokens=7 if n % 2 else 24)
        assert found[n] == (plain.text, plain.tokens, plain.finish_reason, "")
    for n in range(8, 12):
        assert found[n] == ("", [], "error", "the prompt is empty; give some text, or at least one token id")


def test_a_job_is_ended_by_a_bad_row_where_that_is_asked_for() -> None:
    with pytest.raises(ray.exceptions.RayError, match="the prompt is empty"):
        run([{"row_id": 0, "prompt": ""}], errors="raise")


def test_an_example_runs() -> None:
    done = subprocess.run(
        [sys.executable, "examples/ray_map_batches.py"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^\d+ (['\"]).*\1 \d\.\d\d tokens a step$", done.stdout, re.MULTILINE)) == 9
    assert done.stdout.count("the prompt is empty") == 3
