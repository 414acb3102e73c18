"""The formats in which models write tool calls and reasoning, and which of them a chat template belongs to.

    hermes        <tool_call>{"name": "f", "arguments": {...}}</tool_call>      Hermes 2 and 3, Qwen 2.5, Qwen 3
    llama3_json   <|python_tag|>{"name": "f", "parameters": {...}}              Llama 3.1 and later; marker optional
    mistral       [TOOL_CALLS][{"name": "f", "arguments": {...}}]               Mistral; also [TOOL_CALLS]f{...}
    qwen3_coder   <tool_call><function=f><parameter=a>                          Qwen3-Coder, Qwen 3.5, Nemotron 3
                  text or JSON</parameter></function></tool_call>
    deepseek_v3   <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function             DeepSeek-V3 and R1
                  <｜tool▁sep｜>f ```json {...} ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
    deepseek_v31  <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f                    DeepSeek-V3.1
                  <｜tool▁sep｜>{...}<｜tool▁call▁end｜><｜tool▁calls▁end｜>

Names are those of vLLM's parsers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from leapahead.core.errors import BadParameter

Format = TypeVar("Format")
FUNCTION = "<function="  # before the name of a function, in the XML of Qwen3-Coder
OTHERS = ("<arg_key>", "<invoke")  # in <tool_call> of GLM 4.5, MiniMax and others, for which there is no parser
CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"  # DeepSeek's markers
CALL_BEGIN, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes tool calls.

    Attributes:
        name: by which it is chosen.
        start: what stands before a call, or before all of them.
        call: what stands before and after the arguments of a call, behind `start`. The tool's name stands for "%s".
        style: of the calls: a JSON object with name and arguments, XML, or DeepSeek's sections.
        end: the marker after each call; "" for none.
        alone: a marker with which a call begins if the model leaves out `start`; "" if it does not.
        between: what separates calls.
        leads: whether calls stand at the beginning of the text, even without `start`.
        listed: whether `start` stands once, before all calls.
        around: what stands before the first and behind the last call, where they are listed.
        inside: further markers of a call.
        id_length: hexadecimal digits of a call's id; with "call_" before them unless the template wants digits alone.
        plain_id: whether it does.
    """

    name: str
    start: str
    call: tuple[str, str]
    style: Literal["json", "xml", "deepseek"] = "json"
    end: str = ""
    alone: str = ""
    between: str = ""
    leads: bool = False
    listed: bool = False
    around: tuple[str, str] = ("", "")
    inside: tuple[str, ...] = ()
    id_length: int = 24
    plain_id: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """All of its markers. Tokenizers may have them as special tokens."""
        return tuple(each for each in (self.start, self.end, *self.inside) if each)


@dataclass(frozen=True)
class ReasoningFormat:
    """How a model marks what it writes before its answer.

    Attributes:
        name: by which it is chosen.
        start, end: what stands before and after it.
    """

    name: str
    start: str
    end: str


def _deepseek(name: str, call: tuple[str, str], between: str) -> ToolFormat:
    return ToolFormat(
        name,
        CALLS_BEGIN,
        call,
        style="deepseek",
        end=CALL_END,
        alone=CALL_BEGIN,
        between=between,
        listed=True,
        around=("", CALLS_END),
        inside=(CALLS_END, CALL_BEGIN, SEPARATOR),
    )


TOOL_FORMATS = {
    each.name: each
    for each in (
        ToolFormat(
            "hermes",
            "<tool_call>",
            ('\n{"name": "%s", "arguments": ', "}\n</tool_call>"),
            end="</tool_call>",
            between="\n",
        ),
        ToolFormat("llama3_json", "<|python_tag|>", ('{"name": "%s", "parameters": ', "}"), between="; ", leads=True),
        ToolFormat(
            "mistral",
            "[TOOL_CALLS]",
            ('{"name": "%s", "arguments": ', "}"),
            between=", ",
            listed=True,
            around=("[", "]"),
            id_length=9,
            plain_id=True,
        ),
        ToolFormat(
            "qwen3_coder",
            "<tool_call>",
            (f"\n{FUNCTION}%s>\n", "</function>\n</tool_call>"),
            style="xml",
            end="</tool_call>",
            alone=FUNCTION,
            between="\n",
        ),
        _deepseek("deepseek_v3", (f"{CALL_BEGIN}function{SEPARATOR}%s\n```json\n", f"\n```{CALL_END}"), "\n"),
        _deepseek("deepseek_v31", (f"{CALL_BEGIN}%s{SEPARATOR}", CALL_END), ""),
    )
}
REASONING_FORMATS = {
    each.name: each
    for each in (
        ReasoningFormat("deepseek_r1", "<think>", "</think>"),
        ReasoningFormat("qwen3", "<think>", "</think>"),
        ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
    )
}


def tool_format(name: str | None = None, chat_template: str | None = None) -> ToolFormat | None:
    """The format of a model's tool calls: the named one, else the one that its chat template writes; None if neither.

    Raises:
        BadParameter: there is no format of that name.
    """
    if name is not None:
        return _named("tool call", name, TOOL_FORMATS)
    found = _of_template(chat_template or "")
    return None if found is None else TOOL_FORMATS[found]


def _of_template(template: str) -> str | None:
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template:
        if FUNCTION in template:
            return "qwen3_coder"
        return None if any(other in template for other in OTHERS) else "hermes"
    if CALLS_BEGIN in template:
        return "deepseek_v3" if "```" in template else "deepseek_v31"
    if "<|python_tag|>" in template or ("<|start_header_id|>" in template and '"parameters"' in template):
        return "llama3_json"
    return None


def reasoning_format(name: str | None = None, chat_template: str | None = None) -> ReasoningFormat | None:
    """The format of a model's reasoning: the named one, else the one of its chat template; None if neither.

    Raises:
        BadParameter: there is no format of that name.
    """
    if name is not None:
        return _named("reasoning", name, REASONING_FORMATS)
    template = chat_template or ""
    return next((each for each in REASONING_FORMATS.values() if each.start in template or each.end in template), None)


def _named(what: str, name: str, formats: Mapping[str, Format]) -> Format:
    if name not in formats:
        raise BadParameter(f"there is no {what} format {name!r}; there are {', '.join(formats)}")
    return formats[name]
