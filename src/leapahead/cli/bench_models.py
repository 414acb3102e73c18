"""The models of `leapahead bench`: `MODEL` or `MODEL(OPTION=VALUE,FLAG,...)`, with options for one model alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from leapahead.bench.plan import Model
from leapahead.cli.engine_options import ENGINE
from leapahead.cli.options import LOADING, THREADS, all_of, loading_arguments
from leapahead.core.errors import BadParameter
from leapahead.models import loading

OPTIONS = (*LOADING, THREADS, *ENGINE)
WITH_OPTIONS = re.compile(r"(?P<model>.+)\((?P<options>[^()]*)\)", re.DOTALL)


@click.command("model", add_help_option=False)
@all_of(OPTIONS)
def _options(**values: Any) -> None:
    """The options that may stand behind a model."""


def model_of(text: str) -> Model:
    """A model and its options, which are those of the command line without their dashes.

    Raises:
        BadParameter: an option is not there, or its value is not possible.
    """
    found = None if Path(text).exists() else WITH_OPTIONS.fullmatch(text)
    if found is None:
        return Model(path=_path(text))
    pairs = [pair.strip() for pair in found["options"].split(",") if pair.strip()]
    spelled = [re.sub(r"\s*=\s*", "=", pair.lstrip("-"), count=1) for pair in pairs]
    arguments = []
    for pair in spelled:
        name, equals, value = pair.partition("=")
        arguments.append(f"--{_long(name)}{equals}{value}")
    try:
        context = _options.make_context("model", arguments)
    except click.UsageError as error:
        raise BadParameter(f"-m {text!r} is not possible: {error.format_message()}") from None
    given = {name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    options = {name: value for name, value in loading_arguments(context.params).items() if name in given}
    return Model(path=_path(found["model"]), options=options, spelled=", ".join(spelled))


def _path(text: str) -> str | None:
    return None if text == loading.BUNDLED else text


def _long(name: str) -> str:
    """The long name of an option that is given by it or its short name, with underscores, or by its name in Python."""
    for parameter in _options.params:
        if isinstance(parameter, click.Option) and (
            f"-{name}" in parameter.opts or (parameter.name == name and not parameter.is_flag)
        ):
            return max(parameter.opts, key=len).removeprefix("--")
    return name.replace("_", "-")
