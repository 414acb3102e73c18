"""How the model writes tool calls and reasoning, and the grammars that requests ask for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from leapahead.chat import (
    ChatParser,
    ReasoningFormat,
    Tool,
    ToolChoice,
    ToolFormat,
    WithMarkers,
    reasoning_format,
    tool_choice,
    tool_format,
    tool_grammar,
    tools,
)
from leapahead.core.errors import LeapaheadError
from leapahead.core.text import Tokenizer
from leapahead.grammar import Grammar
from leapahead.serve import forms
from leapahead.serve.errors import ApiError, of
from leapahead.serve.messages import NamedTool, ToolParam
from leapahead.serve.prompts import Texts
from leapahead.serve.schema import ChatRequest, Generation
from leapahead.serve.settings import Settings

NONE = "none"  # the name of a parser that finds nothing
T = TypeVar("T")


@dataclass(frozen=True)
class Reading:
    """How an answer is read.

    Attributes:
        tools: how its calls are written; None where it can have none.
        reasoning: how its reasoning is marked; None where all is content.
        choice: whether a tool is to be called.
        prompt: the end of the prompt's text, which may have begun the reasoning.
        available: tools that may be called.
        parallel: whether there may be several calls.
    """

    tools: ToolFormat | None
    reasoning: ReasoningFormat | None
    choice: ToolChoice
    prompt: str
    available: tuple[Tool, ...] = ()
    parallel: bool = True

    def parser(self) -> ChatParser:
        """Reads one answer."""
        forced = self.choice.mode == "required"
        return ChatParser(
            self.tools, self.reasoning, self.prompt, functions=self.available, parallel=self.parallel, forced=forced
        )

    def finish_reason(self, given: str | None, called: bool) -> str | None:
        """As of OpenAI: where the request has named the function, a call is no reason of its own."""
        return "tool_calls" if given == "stop" and called and self.choice.name is None else given


class Formats:
    """The formats of a model.

    Args:
        texts: of the model.
        settings: may name the formats; else those of the chat template are taken.

    Attributes:
        tools, reasoning: see `Reading`.
    """

    def __init__(self, texts: Texts, settings: Settings) -> None:
        self._texts = texts
        self.tools = _named(tool_format, settings.tool_call_parser, texts.template)
        self.reasoning = _named(reasoning_format, settings.reasoning_parser, texts.template)

    @cached_property
    def has_grammars(self) -> bool:
        """Whether texts can have a form: llguidance is installed, and the tokenizer can serve."""
        try:
            self._texts.llm.inputs.grammars.compile(Grammar.json_object())
        except LeapaheadError:
            return False
        return True

    def form(self, body: Generation, reading: Reading | None = None) -> Grammar | None:
        """The grammar of a text without calls; None for text of any form.

        Raises:
            ApiError: it cannot be compiled, or two are given.
        """
        asked, structured = body.response_format, body.structured_outputs
        if asked is not None and asked.type != "text" and structured is not None:
            message = "response_format and structured_outputs are both given; give one of them"
            raise ApiError(400, message, "structured_outputs", "invalid_value")
        reasoning, prompt = (None, "") if reading is None else (reading.reasoning, reading.prompt)
        tokenizer = self._texts.tokenizer
        return self._compiled(self.param(body), lambda: forms.grammar(asked, structured, tokenizer, reasoning, prompt))

    @staticmethod
    def param(body: Generation, reading: Reading | None = None) -> str:
        """The parameter that asks for the form of a text."""
        if reading is not None and reading.tools is not None:
            return "tools"
        return "response_format" if body.structured_outputs is None else "structured_outputs"

    def check(self, given: Sequence[ToolParam] | None) -> None:
        """Refuses tools where the model's way to call them is not known."""
        if given and self.tools is None:
            message = (
                "tools are not possible: the chat template of the model has no known format of tool calls; "
                "the server's option --tool-call-parser names one"
            )
            raise ApiError(400, message, "tools", "unsupported_parameter")

    def available(self, body: ChatRequest) -> tuple[list[Tool], ToolChoice]:
        """The tools of a request, and whether one is to be called.

        Raises:
            ApiError: they are no tools, or the model's way to call them is not known.
        """
        self.check(body.tools)
        found = _about("tools", lambda: tools([tool.model_dump() for tool in body.tools or ()]))
        choice = body.tool_choice
        asked = choice.model_dump() if isinstance(choice, NamedTool) else choice
        chosen = _about("tool_choice", lambda: tool_choice(asked, found))
        return found, chosen

    def reading(self, body: ChatRequest, choice: ToolChoice, available: list[Tool], prompt: list[int]) -> Reading:
        """How the answers of a request are read.

        A text that a regular expression, a choice or a grammar forms as a whole has no reasoning.
        """
        structured = body.structured_outputs
        whole = structured is not None and (structured.regex or structured.choice or structured.grammar)
        reasoning = None if whole else self.reasoning
        end = "" if reasoning is None else self._texts.text(prompt[-len(reasoning.start) - 8 :])
        calls = self.tools if available and choice.mode != "none" else None
        parallel = body.parallel_tool_calls is not False and choice.name is None
        return Reading(calls, reasoning, choice, end, tuple(available), parallel)

    def grammar(self, body: ChatRequest, reading: Reading) -> Grammar | None:
        """The grammar of an answer; None for text of any form.

        Raises:
            ApiError: it cannot be compiled, or there is a form of vLLM's as well as tools.
        """
        if reading.tools is None:
            return self.form(body, reading)
        if body.structured_outputs is not None:
            message = "structured_outputs are not possible together with tools that may be called; leave them out, or"
            raise ApiError(400, f'{message} give "none" as tool_choice', "structured_outputs", "unsupported_parameter")
        form = forms.json_schema(body.response_format)
        calls, tokenizer = reading.tools, self._texts.tokenizer
        assert tokenizer is not None, "a chat has passed its template"
        return self._compiled(
            "tools" if form is None else "response_format",
            lambda: tool_grammar(
                reading.available,
                reading.choice,
                calls,
                tokenizer,
                parallel=reading.parallel,
                reasoning=reading.reasoning,
                prompt=reading.prompt,
                form=form,
            ),
        )

    def tokenizer(self, reading: Reading) -> Tokenizer | None:
        """What gives the texts, with the markers that are looked for; None for the model's own tokenizer."""
        calls = () if reading.tools is None else reading.tools.markers
        thought = () if reading.reasoning is None else (reading.reasoning.start, reading.reasoning.end)
        markers = (*calls, *thought)
        if not markers or self._texts.tokenizer is None:
            return None
        return WithMarkers(self._texts.tokenizer, markers)

    def _compiled(self, param: str, make: Callable[[], Grammar | None]) -> Grammar | None:
        def compiled() -> Grammar | None:
            found = make()
            if found is not None:
                self._texts.llm.inputs.grammars.compile(found)
            return found

        return _about(param, compiled)


def _named(find: Callable[[str | None, str | None], T | None], name: str | None, template: str) -> T | None:
    return None if name == NONE else find(name, template)


def _about(param: str, work: Callable[[], T]) -> T:
    """The result of the work; what it refuses is about this parameter."""
    try:
        return work()
    except LeapaheadError as error:
        found = of(error)
        status = 400 if found.status_code == 500 else found.status_code  # a package or a capability is missing
        raise ApiError(status, found.detail if found.status_code != 500 else str(error), param, found.code) from error
