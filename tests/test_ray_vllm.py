"""The recipe for `ray.data.llm` with the plugin for vLLM, run by `make test-ray-vllm`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray")
pytest.importorskip("vllm")

ROOT = Path(__file__).parents[1]


def test_the_texts_under_ray_are_those_of_vllm() -> None:
    done = subprocess.run(
        [sys.executable, "examples/ray_vllm.py"], capture_output=True, text=True, cwd=ROOT, check=False, timeout=900
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "the texts are those of vLLM without drafts: True" in done.stdout
    assert "def fibonacci(n):\n    " in done.stdout
