"""The tokenizer and the chat template of a GGUF file, as a `leapahead.core.text.Tokenizer`.

llama.cpp tokenizes. The template is code from a file that is not trusted: it is rendered in llama-cpp-python's sandbox.
"""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import llama_cpp as c
import numpy as np

from leapahead.core.errors import BadParameter
from leapahead.core.forks import Mutex
from leapahead.models.llama_cpp.context import Model
from leapahead.models.llama_cpp.options import LlamaCppOptions

SPECIAL = c.LLAMA_TOKEN_ATTR_CONTROL | c.LLAMA_TOKEN_ATTR_UNKNOWN | c.LLAMA_TOKEN_ATTR_UNUSED
# llama.cpp matches many models' patterns by `std::regex`, which takes some 320 bytes of the stack for each character of
# a match, and ends the process where the stack has an end.
BREAK = re.compile(r"\b[ \n]|\n\b")  # what no match goes across
SHORT, LONGEST = 2048, 1 << 20  # characters between two breaks: for any thread's stack, and at most
_stack_size = Mutex()  # that of new threads is one number for the whole process


class GgufTokenizer:
    """The tokenizer of a loaded file.

    Attributes:
        eos_token_id, bos_token_id: None where the file names none.
        end_token_ids: every token that ends a text or a turn, as llama.cpp determines them.
    """

    def __init__(self, model: Model) -> None:
        self._model = model  # it owns the vocabulary
        self._vocab = model.vocab
        self._pieces: dict[tuple[int, bool], bytes] = {}  # those that were asked for, by id and whether special
        # Of byte-pair encodings, llama.cpp's detokenizer may remove spaces before punctuation, as inside a JSON string.
        self._joins = c.llama_vocab_type(self._vocab) == c.LLAMA_VOCAB_TYPE_BPE
        self.eos_token_id = _or_none(c.llama_vocab_eos(self._vocab))
        self.bos_token_id = _or_none(c.llama_vocab_bos(self._vocab))

    def __len__(self) -> int:
        return self._model.vocab_size

    @cached_property
    def end_token_ids(self) -> tuple[int, ...]:
        return tuple(token for token in range(len(self)) if c.llama_vocab_is_eog(self._vocab, token))

    @property
    def chat_template(self) -> str | dict[str, str] | None:
        """The source of the template; where the file has another one for tools, both by name, as in Transformers."""
        main = self._model.meta("tokenizer.chat_template") or None
        tool_use = self._model.meta("tokenizer.chat_template.tool_use")
        if not tool_use or main == tool_use:
            return main
        return {"default": main, "tool_use": tool_use} if main else tool_use

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        work = partial(self._encoded, text.encode("utf-8", "surrogatepass"), add_special_tokens)
        longest = max(map(len, BREAK.split(text))) if self._joins else 0
        return work() if longest <= SHORT else _with_stack(longest, work)

    def _encoded(self, data: bytes, add_special_tokens: bool) -> list[int]:
        size = len(data) + 16
        while True:
            buffer = (c.llama_token * size)()
            count = c.llama_tokenize(self._vocab, data, len(data), buffer, size, add_special_tokens, True)
            if count >= 0:
                return list(buffer[:count])
            size = -count

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        known = [
            token for token in map(int, token_ids) if 0 <= token < len(self)
        ]  # llama.cpp ends the process by others
        if self._joins:
            pieces = [self._piece(token, not skip_special_tokens) for token in known]
            return b"".join(pieces).decode("utf-8", "replace")
        ids = np.asarray(known, dtype=np.int32)
        pointer = ids.ctypes.data_as(ctypes.POINTER(c.llama_token))
        size = 16 * len(ids) + 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            count = c.llama_detokenize(self._vocab, pointer, len(ids), buffer, size, False, not skip_special_tokens)
            if count >= 0:
                return buffer.raw[:count].decode("utf-8", "replace")
            size = -count

    def pieces(self) -> tuple[list[bytes], list[int]]:
        """The bytes of every id, b"" where it stands for no text; and the ids of special tokens."""
        special = [t for t in range(len(self)) if c.llama_vocab_get_attr(self._vocab, t) & SPECIAL]
        return [self._piece(token, True) for token in range(len(self))], special

    def _piece(self, token: int, special: bool) -> bytes:
        """The bytes of a token; of a special one only if `special`."""
        found = self._pieces.get((token, special))
        size = 64
        while found is None:
            buffer = ctypes.create_string_buffer(size)
            count = c.llama_token_to_piece(self._vocab, token, buffer, size, 0, special)
            if count >= 0:
                found = self._pieces[token, special] = buffer.raw[:count]
            size = -count
        return found

    def apply_chat_template(
        self, conversation: list[dict[str, Any]], *, tokenize: bool, add_generation_prompt: bool, **variables: Any
    ) -> str:
        """The text of a conversation; `tokenize` must be false. `variables` are further ones of the template.

        Raises:
            ValueError: the file has no chat template, or the template fails for these messages.
        """
        assert not tokenize, "only the text is given"
        template = self.chat_template
        if isinstance(template, dict):
            template = template["tool_use" if variables.get("tools") else "default"]
        if template is None:
            raise ValueError("the file has no chat template")
        from jinja2 import TemplateError
        from llama_cpp.llama_chat_format import Jinja2ChatFormatter

        def text(token: int | None) -> str:
            return "" if token is None else self.decode([token])

        try:
            formatter = Jinja2ChatFormatter(
                template,
                eos_token=text(self.eos_token_id),
                bos_token=text(self.bos_token_id),
                add_generation_prompt=add_generation_prompt,
            )
            return str(formatter(messages=conversation, **variables).prompt)  # type: ignore[arg-type]
        except TemplateError as error:
            raise ValueError(f"the chat template of the file fails: {error}") from None


def read_tokenizer(path: str | Path) -> GgufTokenizer:
    """The tokenizer of a GGUF file, without its weights.

    Raises:
        LeapaheadError: no such file, or a broken one.
    """
    return GgufTokenizer(Model(path, LlamaCppOptions(), vocab_only=True))


def _with_stack(characters: int, work: Callable[[], list[int]]) -> list[int]:
    """Tokenizes in a thread of its own, whose stack is large enough for so many characters between two breaks.

    Raises:
        BadParameter: they are too many, or the system gives no such stack.
    """
    refusal = BadParameter(
        f"a text with {characters} characters between two spaces or line breaks is not possible, since llama.cpp would "
        f"need {characters >> 10} MiB of stack to tokenize it; divide them by some"
    )
    if characters > LONGEST:
        raise refusal
    with ThreadPoolExecutor(1) as pool:  # which waits for llama.cpp, also after an interrupt
        with _stack_size:
            before = threading.stack_size()
            try:
                threading.stack_size((characters // 1024 + 2) << 20)
                found = pool.submit(work)
            except (ValueError, RuntimeError):  # the system makes no such thread
                raise refusal from None
            finally:
                threading.stack_size(before)
        return found.result()


def _or_none(token: int) -> int | None:
    return token if token >= 0 else None
