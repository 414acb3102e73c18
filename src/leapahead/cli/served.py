"""What `leapahead serve` and `run-batch` share: options of requests, and the application of a loaded model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import click

from leapahead.api import LLM
from leapahead.chat import REASONING_FORMATS, TOOL_FORMATS
from leapahead.cli.command import option
from leapahead.cli.generate import open_llm
from leapahead.core.errors import BadParameter
from leapahead.core.parameters import MOST_BATCH
from leapahead.models.warm_up import WarmsUp
from leapahead.serve.settings import Limits, Settings

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from leapahead.serve.worker import Worker

REQUESTS, LIMITS = "Options of requests", "Limits"
PACKAGES = ("fastapi", "starlette", "uvicorn", "pydantic", "pydantic_core", "prometheus_client", "httptools", "httpx")
DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # of a generation_config that are taken


def _parser(name: str, what: str, formats: Iterable[str]) -> Any:
    return option(
        name,
        type=click.Choice([*formats, "none"]),
        group=REQUESTS,
        show_default="found by the chat template",
        help=f"Format of {what} in the model's texts. With `none`, all of a text is content.",
    )


SERVED = (
    option(
        "--served-model-name",
        "names",
        multiple=True,
        metavar="NAME",
        group=REQUESTS,
        show_default="the model as given",
        help="Name of the model in requests. May be repeated.",
    ),
    option(
        "--max-batch",
        type=click.IntRange(1, MOST_BATCH),
        default=8,
        metavar="N",
        group=REQUESTS,
        help="Greatest number of texts decoded together; further ones wait.",
    ),
    option(
        "--prefill-chunk",
        type=click.IntRange(min=1),
        metavar="N",
        group=REQUESTS,
        show_default="as many as take about four plain steps",
        help="Greatest number of prompt tokens that are read between two steps of running requests.",
    ),
    option(
        "--generation-config",
        is_flag=True,
        group=REQUESTS,
        help="Take sampling parameters that a request leaves out from the model's generation_config, not OpenAI's.",
    ),
    _parser("--tool-call-parser", "tool calls", TOOL_FORMATS),
    _parser("--reasoning-parser", "reasoning", REASONING_FORMATS),
)


def count(name: str, help_text: str, default: int | None = None, least: int = 1) -> Any:
    kind = click.IntRange(min=least)
    return option(name, type=kind, default=default, metavar="N", group=LIMITS, help=help_text)


BOUNDS = (
    count("--max-samples", "Greatest `n`, the number of texts of a prompt.", 16),
    count("--max-prompts", "Greatest number of prompts of a request.", 64),
    count("--max-prompt-tokens", "Greatest length of a prompt in tokens; by default the context's."),
    count("--max-tokens", "Greatest length of a text in tokens; by default the context's."),
    count(
        "--default-max-tokens",
        "Length in tokens of answers in chats where a request names none; by default the context's.",
    ),
    count("--max-logprobs", "Greatest number of alternatives that are reported for each token.", 20, 0),
    count("--max-stops", "Greatest number of stop strings of a request.", 16, 0),
)


def limits_given(values: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `Limits`, removed from a command's values; most options have `max_` before the name."""
    names = {name: field.name for field in fields(Limits) for name in (field.name, f"max_{field.name}")}
    return {field: values.pop(name) for name, field in names.items() if name in values}


def named_model(name: str | None, values: dict[str, Any]) -> str:
    """The model as it was given, as argument or option; then it is the option's value.

    Raises:
        BadParameter: it is given twice.
    """
    if name is not None and values["model"] is not None:
        raise BadParameter(f"the model is given twice, as {name!r} and as --model {values['model']}; give it once")
    values["model"] = name if name is not None else values["model"]
    return values["model"] or "bundled"


def application(
    values: dict[str, Any], chosen: Settings, max_batch: int, prefill_chunk: int | None, generation_config: bool
) -> tuple[ASGIApp, Worker]:
    """Loads the model of a command's values, and makes the application that serves it."""
    from leapahead.serve import app

    llm = open_llm(values, max_batch, prefill_chunk, saves=False)  # the worker does
    if generation_config:
        chosen = replace(chosen, defaults=model_defaults(llm))
    if isinstance(llm.target, WarmsUp):
        llm.target.warm_up(max_batch)
    return app.make(llm, chosen)


def model_defaults(llm: LLM) -> dict[str, float]:
    """The sampling parameters of a model's generation_config.

    Raises:
        BadParameter: the model has none.
    """
    config = getattr(getattr(llm.target, "model", None), "generation_config", None)  # of Transformers only
    if config is None:
        raise BadParameter(
            f"--generation-config is not possible with {llm.target.info.name}: it is read of models of Transformers "
            "only; leave it out"
        )
    found = {name: getattr(config, name, None) for name in DEFAULTS}
    if getattr(config, "do_sample", None) is False:
        found["temperature"] = 0.0
    return {name: value for name, value in found.items() if value is not None}
