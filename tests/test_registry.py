"""Registered drafters: the built-in ones, those of other packages, and the refusal of wrong names, options, classes."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from helpers import Empty, RandomTrees, assert_same_text

from leapahead.core.errors import BadParameter
from leapahead.core.tree import Budget
from leapahead.drafters import registry
from leapahead.drafters.base import Drafter, PerSequence, SequenceDrafter
from leapahead.drafters.plain import Plain
from leapahead.models.toy import ToyTarget
from leapahead.planner.draft import Proposal, SequenceView

DECLARED = """[leapahead.drafters]
theirs = helpers:RandomTrees
not_a_drafter = helpers:fit
not_a_class = helpers:PROMPT
broken = helpers:Nothing
lost = no_such_module:Drafter
plain = helpers:Empty
"""


@pytest.fixture
def third_parties(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package that declares entry points, one of them with a name that is taken."""
    folder = tmp_path / "theirs-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(DECLARED)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_built_in_drafters_load_under_their_names() -> None:
    assert registry.names()[:2] == ["auto", "plain"]
    assert set(registry.names()) - set(registry.ready()) == {*registry.NEEDING}
    drafting = {"draft_model", "cascade", "ouroboros", "speculative_sampling"}  # by another model
    assert set(registry.NEEDING) == {"datastore", "prediction", "head", "triforce", *drafting}
    for name in registry.BUILT_IN:
        drafter = registry.load(name)
        assert issubclass(drafter, (Drafter, SequenceDrafter))
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
        (
            "plain",
            "window",
            r"drafter 'plain' has no option .window. \(an option of lookahead, ouroboros\); it has none",
        ),
        ("jacobi", "qqq", "drafter 'jacobi' has no option 'qqq'; it has block"),
    ],
)
def test_an_unknown_option_is_told_with_the_nearest_and_all(name: str, option: str, says: str) -> None:
    with pytest.raises(BadParameter, match=says):
        registry.make(name, **{option: 3})


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
def test_an_impossible_option_is_refused_at_construction(name: str, options: dict[str, object]) -> None:
    with pytest.raises(BadParameter) as refusal:
        registry.make(name, **options)
    for option, value in options.items():
        assert option in str(refusal.value)
        assert str(value) in str(refusal.value)


def test_an_unknown_source_is_told_with_all() -> None:
    with pytest.raises(BadParameter, match="there is no source 'ngrams'; there are prediction, grammar, ngram, suffix"):
        registry.make("auto", sources="suffix, ngrams")


def test_a_datastore_needs_its_file() -> None:
    with pytest.raises(BadParameter, match=r"'datastore' needs file=.* `leapahead datastore build` writes"):
        registry.make("datastore")


def test_a_drafter_is_no_draft_model_of_ours_but_may_be_one_of_another_package() -> None:
    class Chooses(Plain):
        name = "chooses"

        def __init__(self, draft: str) -> None:
            assert draft == "suffix"

    Chooses.__module__ = "elsewhere"
    with pytest.raises(BadParameter, match=r"^draft='suffix' names a drafter, and no model: give drafter='suffix'"):
        registry.make("draft_model", draft="suffix")
    assert registry.make(Chooses, draft="suffix").name == "chooses"


def test_a_class_may_be_given_instead_of_a_name() -> None:
    made = registry.make(RandomTrees, nodes=3)
    assert isinstance(made, PerSequence)
    assert made.name == RandomTrees.name
    assert isinstance(registry.make(registry.load("suffix")), Drafter)
    with pytest.raises(BadParameter, match="drafter 'random' has no option 'node'"):
        registry.make(RandomTrees, node=3)


class Nameless(SequenceDrafter):
    def propose(self, sequence: SequenceView, budget: Budget) -> Proposal:
        raise NotImplementedError


class Unfinished(Drafter):
    name: ClassVar[str] = "unfinished"


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        (Nameless, "the drafter class Nameless has no name; give it one, such as name = 'my_drafter'"),
        (Unfinished, r"the drafter class Unfinished must define propose\(\)"),
        (dict, "a drafter must be a name or a class, got <class 'dict'>, which is not a subclass of leapahead.Drafter"),
        (7, "a drafter must be a name or a class, got 7, which is not a subclass"),
    ],
)
def test_what_is_no_drafter_class_is_refused_in_one_sentence(drafter: Any, message: str) -> None:
    with pytest.raises(BadParameter, match=message):
        registry.make(drafter)


@pytest.mark.usefixtures("third_parties")
def test_a_drafter_of_another_package_is_named_loaded_and_decodes() -> None:
    assert registry.names() == [*registry.BUILT_IN, "broken", "lost", "not_a_class", "not_a_drafter", "theirs"]
    assert registry.load("theirs") is RandomTrees
    assert_same_text(ToyTarget(), registry.make("theirs", seed=3, nodes=6))
    with pytest.raises(BadParameter, match=r"no option 'nods' \(did you mean 'nodes'\?\)"):
        registry.make("theirs", nods=6)


def test_a_drafter_whose_default_is_no_value_of_json_is_listed(leapahead: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Placed(Empty):
        name = "placed"

        def __init__(self, folder: Path = Path("here")) -> None: ...

    monkeypatch.setattr(registry, "_third_party", lambda: {"placed": SimpleNamespace(load=lambda: Placed)})
    *_, last = json.loads(leapahead("drafters", "--json").stdout)
    assert last["options"][0]["default"] == "here"


@pytest.mark.usefixtures("third_parties")
def test_a_name_that_is_taken_stays_ours() -> None:
    assert registry.load("plain") is Plain is not Empty


@pytest.mark.usefixtures("third_parties")
@pytest.mark.parametrize("name", ["not_a_drafter", "not_a_class"])
def test_an_entry_point_that_gives_no_drafter_is_refused(name: str) -> None:
    with pytest.raises(BadParameter, match=f"entry point '{name}' gives .* not a subclass of leapahead.Drafter"):
        registry.load(name)


@pytest.mark.usefixtures("third_parties")
@pytest.mark.parametrize(("name", "why"), [("broken", "has no attribute 'Nothing'"), ("lost", "No module named")])
def test_an_entry_point_that_cannot_be_loaded_is_named(name: str, why: str, leapahead: Any) -> None:
    message = f"the drafter '{name}' of the package theirs cannot be loaded from its entry point '.*': .*{why}"
    with pytest.raises(BadParameter, match=message):
        registry.load(name)
    result = leapahead("drafters", "--json")
    assert result.exit_code == 0
    assert [each["name"] for each in json.loads(result.stdout)] == [*registry.BUILT_IN, RandomTrees.name]
    assert re.search(f"warning: {message}", result.stderr)
