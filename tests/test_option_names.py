"""What is said of options that other libraries have: it names options that exist here."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest
from click.testing import CliRunner

from leapahead.api import OF_LLM
from leapahead.cli import main
from leapahead.cli.command import OTHER_NAMES
from leapahead.drafters import registry
from leapahead.inputs import Options
from leapahead.models.loading import ENGINE_OPTIONS
from leapahead.option_names import OTHERS_OF_LLM, OTHERS_OF_TEXT

OF_TEXT, OF_MODEL = set(Options.__annotations__), {*OF_LLM, *ENGINE_OPTIONS}
ELSEWHERE = {"json_schema", *registry.names()}  # of `Grammar`, and drafters


@pytest.mark.parametrize(("others", "own"), [(OTHERS_OF_TEXT, OF_TEXT), (OTHERS_OF_LLM, OF_MODEL)])
def test_what_is_said_names_options_that_exist(others: Mapping[str, str], own: set[str]) -> None:
    assert not set(others) & own
    for sentence in others.values():
        named = {*re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", sentence), *re.findall(r"\b(\w+)=", sentence)}
        assert named - ELSEWHERE <= OF_TEXT | OF_MODEL, sentence


def test_options_of_other_programs_lead_to_those_of_a_command() -> None:
    own = {name for command in main.commands.values() for each in command.params for name in each.opts}
    for meant in OTHER_NAMES.values():
        assert set(meant) <= own
    result = CliRunner().invoke(main, ["generate", "x", "--n-predict", "3"])
    assert result.exit_code == 2
    assert "No such option '--n-predict'; use --max-new-tokens." in result.output
