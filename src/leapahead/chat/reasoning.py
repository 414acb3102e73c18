"""Divides what a model writes into reasoning and answer, piece by piece."""

from __future__ import annotations

from leapahead.chat.formats import ReasoningFormat


def unfinished(text: str, marker: str) -> int:
    """Length of the longest end of `text` that is a beginning of `marker`, but not the whole marker."""
    longest = min(len(text), len(marker) - 1)
    return next((length for length in range(longest, 0, -1) if marker.startswith(text[-length:])), 0)


class ReasoningParser:
    """Gives (reasoning, answer) pieces. All text is kept, the two markers left out.

    Args:
        format: of the model.
        prompt: the text of the prompt. Where it ends with the opening marker, as templates may write it, the model's
            text begins with reasoning; elsewhere reasoning begins with the marker, at the beginning of the text.
    """

    def __init__(self, format: ReasoningFormat, prompt: str = "") -> None:
        self._format = format
        self._text = ""  # not decided yet
        self._where = "reasoning" if prompt.rstrip().endswith(format.start) else "beginning"

    def add(self, text: str) -> tuple[str, str]:
        """Takes more text of the model."""
        self._text += text
        if self._where == "beginning":
            trimmed = self._text.lstrip()
            if trimmed.startswith(self._format.start):
                self._text, self._where = trimmed[len(self._format.start) :], "reasoning"
            elif trimmed and not self._format.start.startswith(trimmed):
                self._where = "answer"
        if self._where == "reasoning":
            before, found, after = self._text.partition(self._format.end)
            if found:
                self._where, self._text = "answer", ""
                return before, after
            kept = unfinished(self._text, self._format.end)
            given, self._text = self._text[: len(self._text) - kept], self._text[len(self._text) - kept :]
            return given, ""
        if self._where == "answer":
            return "", self._take()
        return "", ""

    def finish(self) -> tuple[str, str]:
        """The end of the model's text."""
        return (self._take(), "") if self._where == "reasoning" else ("", self._take())

    def _take(self) -> str:
        given, self._text = self._text, ""
        return given
