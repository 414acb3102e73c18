"""Starts `leapahead serve` on the bundled model, sends a chat by the `openai` package, and stops the server.

Run it with `python examples/serve_request.py`.
"""

import json
import os
import subprocess
import sys

import openai

TEXT = "The server decodes requests together. It starts in a second, and its log is lines of JSON."


def main() -> None:
    server = subprocess.Popen(
        [sys.executable, "-m", "leapahead", "serve", "--port", "0"], stderr=subprocess.PIPE, text=True
    )
    assert server.stderr is not None
    try:
        for line in server.stderr:
            if '"listening"' in line:
                break
            print(line, end="", file=sys.stderr)
        else:
            sys.exit("the server has not started")
        url = json.loads(line)["url"]
        client = openai.OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("LEAPAHEAD_API_KEY", "none"))
        answer = client.chat.completions.create(
            model="bundled",
            messages=[{"role": "user", "content": f"Repeat: {TEXT}"}],
            prediction={"type": "content", "content": TEXT},  # drafted; never changes the answer
            temperature=0,
            max_tokens=32,
            extra_body={"leapahead": {"stats": True}},
        )
        print(answer.choices[0].message.content)
        print(f"{answer.usage.completion_tokens} tokens in {answer.leapahead['steps']} forwards, from {url}")
    finally:
        server.terminate()
        server.communicate()
    assert server.returncode == 0 or os.name == "nt"  # where a program that is told to end cannot say how it ended


if __name__ == "__main__":
    main()
