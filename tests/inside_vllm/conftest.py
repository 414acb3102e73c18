"""The tests here need vLLM in the same environment, and run by `make test-vllm`; elsewhere they are not collected."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]
