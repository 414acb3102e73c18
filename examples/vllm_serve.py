"""A vLLM server with our drafters: it is started, gets a request with a prediction, shows its metrics, and is ended.

Runs in an environment with vLLM and leapahead; `make test-vllm` makes one and runs it. An argument names a model.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from urllib.error import URLError
from urllib.request import Request, urlopen

from vllm_generate import OLD, bundled

SECONDS = 300  # to start


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else bundled()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    speculative = {
        "method": "custom_class",
        "model": "leapahead.integrations.vllm.Proposer",
        "num_speculative_tokens": 8,
    }
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model),
        *("--served-model-name", "model", "--port", str(port), "--host", "127.0.0.1"),
        *("--max-model-len", "1024", "--dtype", "float32", "--enforce-eager"),
        *("--speculative-config", json.dumps(speculative)),
        *("--additional-config", json.dumps({"leapahead": {"report_seconds": 1}})),
    ]
    with tempfile.TemporaryDirectory() as metrics:
        environment = {
            **os.environ,
            "VLLM_USE_V2_MODEL_RUNNER": "0",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            # The engine is another process than the server, and both write their metrics here.
            "PROMETHEUS_MULTIPROC_DIR": metrics,
        }
        server = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            wait(address, server)
            request = {
                "model": "model",
                "prompt": OLD.replace("items", "values") + "\n\nclass Stack:\n",
                "temperature": 0,
                "max_tokens": 96,
                "vllm_xargs": {"prediction": OLD},
            }
            for _ in range(3):
                print(ask(f"{address}/v1/completions", request)["choices"][0]["text"])
                time.sleep(1.1)  # metrics are sent once a second
            lines = urlopen(f"{address}/metrics").read().decode().splitlines()
            found = [line for line in lines if line.startswith("leapahead:")]
            print("\n".join(found))
            assert any("drafted_tokens_total" in line for line in found), "no metrics of the proposer"
        finally:
            server.terminate()
            server.wait(60)


def ask(address: str, request: dict[str, object]) -> dict[str, list[dict[str, str]]]:
    body = Request(address, json.dumps(request).encode(), {"Content-Type": "application/json"})
    found: dict[str, list[dict[str, str]]] = json.load(urlopen(body))
    return found


def wait(address: str, server: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        assert server.poll() is None, f"the server ended with {server.returncode}"
        try:
            urlopen(f"{address}/health")
            return
        except (URLError, ConnectionError):
            time.sleep(0.5)
    raise TimeoutError(f"the server did not start in {SECONDS} seconds")


if __name__ == "__main__":
    main()
