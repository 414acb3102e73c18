"""The models of `bench` and `tune`: `MODEL` or `MODEL(OPTION=VALUE,FLAG,...)`, with options for one model alone.

A value with commas is put in quotes: `MODEL(devices="cuda:0,cuda:1")`.
"""

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
from leapahead.core.parameters import listed
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
    spelled = [re.sub(r"\s*=\s*", "=", pair.lstrip("-"), count=1) for pair in listed(found["options"])]
    arguments = []
    for pair in spelled:
        name, equals, value = pair.partition("=")
        arguments.append(f"--{_long(name)}{equals}{value}")
    try:
        context = _options.make_context("model", arguments)
    except click.UsageError as error:
        raise BadParameter(f"{text!r} is not possible: {_why(error)}") from None
    given = {name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    options = {name: value for name, value in loading_arguments(context.params).items() if name in given}
    return Model(path=_path(found["model"]), options=options, spelled=", ".join(spelled))


def _why(error: click.UsageError) -> str:
    """Why options behind a model are not possible, and where they are."""
    reason = error.format_message()
    if not isinstance(error, click.NoSuchOption):
        return reason
    context = click.get_current_context(silent=True)
    if any(error.option_name in parameter.opts for parameter in (context.command.params if context else ())):
        return f"{error.option_name} is not an option of one model; it stands outside the parentheses, for all models"
    return f"{reason} A value with commas is put in quotes, as in 'MODEL(devices=\"cuda:0,cuda:1\")'."


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
