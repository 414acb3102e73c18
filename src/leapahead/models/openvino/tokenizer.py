"""The tokenizer of an OpenVINO folder, as a `leapahead.core.text.Tokenizer`.

Openvino-genai runs the tokenizer that was exported with the model, and renders the chat template in a renderer of its
own, so that neither torch nor Transformers is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import openvino_genai

from leapahead.core.errors import BadParameter, Refused
from leapahead.models.openvino.compiled import cause


class OpenVinoTokenizer:
    """The tokenizer of a folder.

    Args:
        folder: with openvino_tokenizer.xml and openvino_detokenizer.xml.

    Attributes:
        eos_token_id, bos_token_id: None where the folder names none.

    Raises:
        BadParameter: it cannot be loaded.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            self._tokenizer: Any = openvino_genai.Tokenizer(str(folder))
        except RuntimeError as error:
            raise BadParameter(
                f"the tokenizer of {str(folder)!r} cannot be loaded: {cause(error)}; export the model again"
            ) from None
        self.eos_token_id = _or_none(self._tokenizer.get_eos_token_id())
        self.bos_token_id = _or_none(self._tokenizer.get_bos_token_id())

    @cached_property
    def _size(self) -> int:
        return max(self._tokenizer.get_vocab().values(), default=-1) + 1

    def __len__(self) -> int:
        return self._size

    @property
    def chat_template(self) -> str | None:
        return str(self._tokenizer.chat_template) or None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        # The converted tokenizer takes UTF-8, which has no lone surrogates.
        clean = text.encode("utf-8", "replace").decode("utf-8")
        found = self._tokenizer.encode(clean, add_special_tokens=add_special_tokens)
        return [int(token) for token in found.input_ids.data[0]]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        ids = [int(token) for token in token_ids]
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)) if ids else ""

    def description(self) -> str:
        """The text of tokenizer.json, from which the graphs were made.

        Raises:
            Refused: the folder has none.
        """
        try:
            return (self._folder / "tokenizer.json").read_text(encoding="utf-8")
        except OSError:
            raise Refused(
                f"constrained decoding needs tokenizer.json in {str(self._folder)!r}; export the model again from its "
                "Transformers folder, or decode the GGUF file with llama.cpp"
            ) from None

    def apply_chat_template(
        self, conversation: list[dict[str, Any]], *, tokenize: bool, add_generation_prompt: bool, **variables: Any
    ) -> str:
        """The text of a conversation; `tokenize` must be false. `variables` are further ones of the template.

        Raises:
            ValueError: the folder has no chat template, or the template fails for these messages.
        """
        assert not tokenize, "only the text is given"
        if self.chat_template is None:
            raise ValueError("the folder has no chat template")
        try:
            more = {"extra_context": variables} if variables else {}
            return str(self._tokenizer.apply_chat_template(conversation, add_generation_prompt, **more))
        except RuntimeError as error:
            reason = cause(RuntimeError(str(error).rpartition("Minja's error: ")[2]))  # behind general advice
            raise ValueError(
                f"the chat template of the folder fails: {reason}; where it is right, install Transformers, which has "
                "all of Jinja"
            ) from None


def _or_none(token: int) -> int | None:
    return int(token) if token >= 0 else None
