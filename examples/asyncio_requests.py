"""Requests of asyncio tasks, decoded together; one of them is cancelled.

Run it with `python examples/asyncio_requests.py`.
"""

import asyncio

from leapahead import AsyncLLM

OPTIONS = '''class Options:
    def set_name(self, name):
        """Set the name of the option."""
        self.name = name

    def set_value(self, value):
'''
MESSAGE = '''class Message:
    @property
    def sender(self):
        """The sender of the message."""
        return self._sender

    @property
    def subject(self):
'''


async def stream(llm: AsyncLLM, prompt: str) -> str:
    """Collects the text of a stream."""
    text = ""
    async for piece in llm.stream(prompt, max_new_tokens=32):
        text += piece.text
    return text


async def main() -> None:
    async with AsyncLLM() as llm:
        endless = asyncio.create_task(llm.generate("while True:\n", max_new_tokens=1000, ignore_eos=True))
        streamed, result = await asyncio.gather(
            stream(llm, OPTIONS),
            llm.generate(MESSAGE, max_new_tokens=32),
        )
        endless.cancel()  # ends its request and frees its cache rows
        print(streamed, result.text, sep="\n---\n")
        assert (await asyncio.gather(endless, return_exceptions=True))[0].__class__ is asyncio.CancelledError


if __name__ == "__main__":
    asyncio.run(main())
