"""Drafters by name: ours, third parties' through entry points, and what is said of a wrong name or option."""

from __future__ import annotations

import inspect
import re
from importlib.metadata import EntryPoint

import pytest
from helpers import Empty, RandomTrees, assert_same_text

import leapahead.drafters.registry as registry
from leapahead.core.errors import BadParameter
from leapahead.drafters.base import Drafter
from leapahead.drafters.plain import Plain
from leapahead.models.toy import ToyTarget


@pytest.fixture
def third_parties(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if packages had been installed that declare these entry points."""
    declared = [
        EntryPoint("theirs", "helpers:RandomTrees", registry.GROUP),
        EntryPoint("not_a_drafter", "helpers:fit", registry.GROUP),
        EntryPoint("not_a_class", "helpers:PROMPT", registry.GROUP),
        EntryPoint("plain", "helpers:Empty", registry.GROUP),  # a name that is taken
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: declared if group == registry.GROUP else [])


def test_ours_are_there_and_load_as_drafters_of_their_name() -> None:
    assert {"auto", "plain", "jacobi", "prompt_lookup", "lookahead"} <= set(registry.names())
    assert {"ngram", "suffix", "recycling", "datastore", "prediction"} <= set(registry.names())
    assert registry.names()[:2] == ["auto", "plain"]
    assert set(registry.names()) - set(registry.ready()) == {*registry.NEEDING}
    assert set(registry.NEEDING) == {"datastore", "prediction", "draft_model", "speculative_sampling"}
    for name in registry.BUILT_IN:
        drafter = registry.load(name)
        assert issubclass(drafter, Drafter)
        assert drafter.name == name


@pytest.mark.parametrize("name", registry.BUILT_IN)
def test_every_drafter_and_option_of_ours_is_described(name: str) -> None:
    """The help text is made of the docstrings."""
    drafter = registry.load(name)
    text = inspect.getdoc(drafter) or ""
    assert text.splitlines()[0].endswith(".")
    described = re.findall(r"^    (\w+): .+", text.partition("Args:\n")[2], flags=re.MULTILINE)
    assert described == list(registry.options(drafter))


@pytest.mark.parametrize(
    ("wrong", "nearest"), [("lookahed", "lookahead"), ("promptlookup", "prompt_lookup"), ("jakobi", "jacobi")]
)
def test_an_unknown_name_is_told_with_the_nearest_and_all(wrong: str, nearest: str) -> None:
    with pytest.raises(BadParameter) as refusal:
        registry.load(wrong)
    assert f"no drafter {wrong!r} (did you mean {nearest!r}?)" in str(refusal.value)
    assert ", ".join(registry.names()) in str(refusal.value)


def test_a_name_like_no_other_is_told_without_a_guess() -> None:
    with pytest.raises(BadParameter, match="no drafter 'qqq'; there are auto, plain, "):
        registry.load("qqq")


@pytest.mark.parametrize(
    ("name", "option", "says"),
    [
        ("lookahead", "windows", r"drafter 'lookahead' has no option 'windows' \(did you mean 'window'\?\); it has "),
        ("plain", "window", "drafter 'plain' has no option 'window'; it has none"),
        ("jacobi", "qqq", "drafter 'jacobi' has no option 'qqq'; it has block"),
    ],
)
def test_an_unknown_option_is_told_with_the_nearest_and_all(name: str, option: str, says: str) -> None:
    with pytest.raises(BadParameter, match=says):
        registry.factory(name, **{option: 3})


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("lookahead", {"window": 0}),
        ("lookahead", {"ngram": 1}),
        ("lookahead", {"guesses": 0}),
        ("lookahead", {"preset": "poem"}),
        ("lookahead", {"pool_capacity": 0}),
        ("jacobi", {"block": 0}),
        ("prompt_lookup", {"num_tokens": 0}),
        ("prompt_lookup", {"min_ngram": 3, "max_ngram": 2}),
        ("auto", {"nodes": -1}),
        ("auto", {"max_nodes": 0}),
        ("ngram", {"longest": 0}),
        ("suffix", {"nodes": -1}),
        ("recycling", {"k": -1}),
        ("recycling", {"longest": 0}),
        ("prediction", {"nodes": -1}),
    ],
)
def test_an_impossible_option_is_told_when_the_factory_is_made(name: str, options: dict[str, object]) -> None:
    with pytest.raises(BadParameter) as refusal:
        registry.factory(name, **options)
    for option, value in options.items():
        assert option in str(refusal.value)
        assert str(value) in str(refusal.value)


def test_an_unknown_source_is_told_with_all() -> None:
    with pytest.raises(BadParameter, match="there is no source 'ngrams'; there are prediction, ngram, suffix"):
        registry.factory("auto", sources="suffix, ngrams")


def test_a_datastore_needs_its_file() -> None:
    with pytest.raises(BadParameter, match=r"'datastore' needs file=\.\.\., which `leapahead datastore build` writes"):
        registry.factory("datastore")


def test_a_factory_makes_one_instance_a_sequence_with_the_options_given() -> None:
    make = registry.factory("jacobi", block=3)
    one, two = make(), make()
    assert one is not two
    assert one.block == two.block == 3  # type: ignore[attr-defined]


def test_a_class_may_be_given_instead_of_a_name() -> None:
    made = registry.factory(RandomTrees, nodes=3)()
    assert isinstance(made, RandomTrees)
    assert made.nodes == 3
    with pytest.raises(BadParameter, match="drafter 'random' has no option 'node'"):
        registry.factory(RandomTrees, node=3)


@pytest.mark.usefixtures("third_parties")
def test_a_third_partys_drafter_is_named_loaded_and_decodes() -> None:
    assert registry.names() == [*registry.BUILT_IN, "not_a_class", "not_a_drafter", "theirs"]
    assert registry.load("theirs") is RandomTrees
    make = registry.factory("theirs", seed=3, nodes=6)
    assert_same_text(ToyTarget(), make())
    with pytest.raises(BadParameter, match=r"no option 'nods' \(did you mean 'nodes'\?\)"):
        registry.factory("theirs", nods=6)


@pytest.mark.usefixtures("third_parties")
def test_a_name_that_is_taken_stays_ours() -> None:
    assert registry.load("plain") is Plain is not Empty


@pytest.mark.usefixtures("third_parties")
@pytest.mark.parametrize("name", ["not_a_drafter", "not_a_class"])
def test_an_entry_point_that_gives_no_drafter_is_refused(name: str) -> None:
    with pytest.raises(BadParameter, match=f"entry point '{name}' gives .* not a subclass of leapahead.Drafter"):
        registry.load(name)
