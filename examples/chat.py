"""Chat with a model. The whole conversation is the prompt of each answer; drafted text is shown in brackets.

Run it with `python examples/chat.py [MODEL]`: a hub name, a folder or a GGUF file; by default the bundled model.
End with Ctrl-D. `leapahead chat` is the same with colours and options.
"""

import sys

from leapahead import LLM


def main() -> None:
    messages: list[dict[str, str]] = []
    with LLM(sys.argv[1] if len(sys.argv) > 1 else None) as llm:
        while True:
            try:
                messages.append({"role": "user", "content": input("> ")})
            except EOFError:
                return
            answer = ""
            for piece in llm.stream(messages, max_new_tokens=64):
                for text, drafted in piece.spans:
                    print(f"[{text}]" if drafted else text, end="", flush=True)
                answer += piece.text
            print()
            messages.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    main()
