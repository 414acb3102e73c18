"""Constrained decoding: the text has the form of the grammar, and is plain decoding's with every drafter."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest
from helpers import Spelling, mostly_slow
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from leapahead import LLM, AsyncLLM, Grammar
from leapahead.core.errors import BadParameter, LeapaheadError, Refused
from leapahead.core.grammar import CompiledGrammar
from leapahead.core.sampling import SamplingParams
from leapahead.core.token_bytes import token_bytes
from leapahead.drafters import registry
from leapahead.grammar import GrammarProcessor, Grammars
from leapahead.grammar.compiled import MOST_MASKS, State
from leapahead.models.toy import ToyTarget

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

PADDING = 32  # rows of logits without a token
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "born": {"type": "integer", "minimum": 0, "maximum": 3000},
        "languages": {"type": "array", "items": {"enum": ["English", "French"]}, "maxItems": 3},
    },
    "required": ["name", "born", "languages"],
    "additionalProperties": False,
}
# Two texts that differ in what was written before, and not in the lexeme that is being written.
BRANCHES = 'start: "(" WORD "!" | "<" WORD "?"\nWORD: /[a-z]+/'
ROW = {"type": "array", "items": {"enum": ["Fox", True, 1]}, "maxItems": 3}
EITHER = {"anyOf": [ROW, {"type": "object", "properties": {"a": ROW}, "required": ["a"]}]}
# Lexemes that llguidance's matcher does not go back in.
LIMITED = 'start: x "-" y\nx[max_tokens=3]: /[a-c]+/\ny[stop="d"]: /[a-d]+/'
BALANCED = 'start: "(" start ")" | /[ab]{1,3}/'
GBNF = 'root ::= "yes" | "no" ("," " no")*'
GBNF_AS_REGEX = "yes|no(, no)*"
GRAMMARS = {
    "schema": Grammar.json_schema(PERSON),
    "compact": Grammar.json_schema(json.dumps(PERSON), compact=True),
    "regex": Grammar.regex(r"[A-Z][a-z]{2,9}( [0-9]{2}){1,4}"),
    "lark": Grammar.lark(BALANCED),
    "gbnf": Grammar.lark(GBNF),
    "choices": Grammar.choices(["return", "returned", "the quick brown fox", "日本語 😀"]),
}
GREEDY: dict[str, Any] = {}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 7}
CONFIGURED: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in registry.BUILT_IN if name not in registry.NEEDING and name != "plain"),
    ("auto", {"nodes": 12}),
    ("auto", {"nodes": 6, "sources": "grammar"}),
    ("auto", {"nodes": 8, "sources": "ngram,suffix,recycling,siblings"}),
]


@pytest.fixture(scope="module")
def llm(tokenizer: Any) -> LLM:
    """A toy target whose tokens are those of a real tokenizer, and more rows than the tokenizer has ids."""
    return LLM(ToyTarget(len(tokenizer) + PADDING, sharpness=4.0), tokenizer=tokenizer)


@pytest.fixture(scope="module")
def grammars(tokenizer: Any) -> Grammars:
    return Grammars(tokenizer, len(tokenizer) + PADDING, (0,))


def state(grammars: Grammars, grammar: Grammar, tokens: list[int] | None = None) -> State:
    return grammars.compile(grammar).follow([] if tokens is None else tokens, 400)


# Exactness


@pytest.mark.parametrize("sampling", mostly_slow([GREEDY, SAMPLED], SAMPLED), ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", GRAMMARS)
def test_every_drafter_gives_the_text_of_plain_decoding(llm: LLM, name: str, sampling: dict[str, Any]) -> None:
    options: dict[str, Any] = {"grammar": GRAMMARS[name], "max_new_tokens": 120, **sampling}
    plain = llm.generate("def add(a, b):", drafter="plain", **options)
    for drafter, given_options in CONFIGURED:
        result = llm.generate("def add(a, b):", drafter=drafter, drafter_options=given_options, **options)
        assert (result.tokens, result.text, result.finish_reason) == (plain.tokens, plain.text, plain.finish_reason), (
            drafter,
            given_options,
        )


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_batch_with_a_grammar_for_each_prompt(llm: LLM, sampling: dict[str, Any]) -> None:
    forms = [*GRAMMARS.values(), None]
    prompts = [f"number {index}" for index in range(len(forms))]
    together = llm.generate(prompts, grammar=forms, max_new_tokens=60, drafter_options={"nodes": 8}, **sampling)
    alone = [
        llm.generate(prompt, grammar=form, max_new_tokens=60, drafter="plain", **sampling)
        for prompt, form in zip(prompts, forms, strict=True)
    ]
    assert [each.tokens for each in together] == [each.tokens for each in alone]


def test_samples_and_streams_follow_the_grammar_each_for_itself(llm: LLM) -> None:
    options: dict[str, Any] = {"grammar": GRAMMARS["regex"], "max_new_tokens": 60, "temperature": 1.5, "seed": 1}
    samples = llm.generate("number", n=5, **options)
    assert len({sample.text for sample in samples}) > 1
    for index, sample in enumerate(samples):
        own = {**options, "seed": 1 + index}
        assert sample.tokens == llm.generate("number", drafter="plain", **own).tokens
        assert "".join(piece.text for piece in llm.stream("number", **own)) == sample.text


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_bundled_model(tiny_bundled: LLM, sampling: dict[str, Any]) -> None:
    options: dict[str, Any] = {"grammar": GRAMMARS["schema"], "max_new_tokens": 150, **sampling}
    plain = tiny_bundled.generate("# A person as JSON:\n", drafter="plain", **options)
    jsonschema.validate(json.loads(plain.text), PERSON)
    for drafter, nodes in (("auto", 16), ("auto", 0), ("recycling", 8), ("lookahead", 0)):
        given_options = {"nodes": nodes} if nodes else {}
        result = tiny_bundled.generate(
            "# A person as JSON:\n", drafter=drafter, drafter_options=given_options, **options
        )
        assert result.tokens == plain.tokens


@pytest.fixture(scope="module")
def tiny_bundled() -> LLM:
    return LLM()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the draft model")
def test_draft_models_and_the_rejection_rule(tokenizer: Any) -> None:
    """The rejection rule keeps the distribution, so that only the form of its texts is known."""
    size = len(tokenizer) + PADDING
    drafted = LLM(ToyTarget(size, sharpness=4.0), tokenizer=tokenizer, draft=ToyTarget(size, sharpness=4.0, order=1))
    for sampling in (GREEDY, SAMPLED):
        options: dict[str, Any] = {"grammar": GRAMMARS["regex"], "max_new_tokens": 60, **sampling}
        plain = drafted.generate("number", drafter="plain", **options)
        assert drafted.generate("number", drafter="draft_model", **options).tokens == plain.tokens
        assert drafted.generate("number", drafter_options={"nodes": 8}, **options).tokens == plain.tokens
    sampled = drafted.generate("number", drafter="speculative_sampling", **options)
    assert re.fullmatch(r"[A-Z][a-z]{2,9}( [0-9]{2}){1,4}", sampled.text)


def test_tasks_of_asyncio(llm: LLM) -> None:
    async def texts() -> list[str]:
        async with AsyncLLM(llm.target, tokenizer=llm.tokenizer) as shared:
            asked = [shared.generate("a", grammar=grammar, max_new_tokens=60) for grammar in GRAMMARS.values()]
            return [result.text for result in await asyncio.gather(*asked)]

    alone = [
        llm.generate("a", grammar=grammar, max_new_tokens=60, drafter="plain").text for grammar in GRAMMARS.values()
    ]
    assert asyncio.run(texts()) == alone


# The form of the text


def test_each_kind_of_grammar_gives_texts_of_its_form(llm: LLM) -> None:
    fits: dict[str, Callable[[str], object]] = {
        "schema": lambda text: jsonschema.validate(json.loads(text), PERSON),
        "compact": lambda text: jsonschema.validate(json.loads(text), PERSON),
        "regex": re.compile(r"[A-Z][a-z]{2,9}( [0-9]{2}){1,4}").fullmatch,
        "lark": lambda text: re.fullmatch(r"[ab]{1,3}", text.strip("()")) and text.count("(") == text.count(")"),
        "gbnf": re.compile(GBNF_AS_REGEX).fullmatch,
        "choices": {"return", "returned", "the quick brown fox", "日本語 😀"}.__contains__,
    }
    ended = 0
    for name, grammar in GRAMMARS.items():
        for result in llm.generate("a", grammar=grammar, n=4, temperature=2.0, seed=3, max_new_tokens=400):
            if result.finish_reason == "stop":
                ended += 1
                assert fits[name](result.text) in (None, True) or fits[name](result.text), (name, result.text)
    assert ended >= 20


def schemas() -> st.SearchStrategy[dict[str, Any]]:
    """Schemas of which every text is short."""
    leaves: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
        [
            {"type": "boolean"},
            {"type": "null"},
            {"type": "integer", "minimum": -5, "maximum": 1200},
            {"type": "string", "maxLength": 5},
            {"type": "string", "pattern": "^[a-f]{2,4}$"},
            {"enum": ["red", 3, None]},
            {"const": {"a": [1, "x"]}},
        ]
    )

    def larger(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
        arrays = st.builds(
            lambda items, least: {"type": "array", "items": items, "minItems": least, "maxItems": least + 1},
            inner,
            st.integers(0, 2),
        )
        keys = st.dictionaries(st.sampled_from(["a", "b c", 'quo"te', "日本", "sum"]), inner, max_size=3)
        objects = st.builds(
            lambda properties, every: {
                "type": "object",
                "properties": properties,
                "required": sorted(properties)[: len(properties) if every else 1],
                "additionalProperties": False,
            },
            keys,
            st.booleans(),
        )
        return arrays | objects | st.builds(lambda a, b: {"anyOf": [a, b]}, inner, inner)

    return st.recursive(leaves, larger, max_leaves=5)


@pytest.mark.slow
@settings(max_examples=40)
@given(schema=schemas(), seed=st.integers(0, 1000), compact=st.booleans())
def test_json_of_any_schema_is_valid_and_exact(llm: LLM, schema: dict[str, Any], seed: int, compact: bool) -> None:
    options: dict[str, Any] = {
        "grammar": Grammar.json_schema(schema, compact),
        "temperature": 1.0,
        "seed": seed,
        "max_new_tokens": 300,
    }
    result = llm.generate("add", drafter_options={"nodes": 8}, **options)
    assert result.tokens == llm.generate("add", drafter="plain", **options).tokens
    assume(result.finish_reason == "stop")  # white space may use up the length
    jsonschema.validate(json.loads(result.text), schema)


def test_forced_tokens_are_drafted_and_accepted(tiny_bundled: LLM) -> None:
    keys = {f"a_rather_long_key_{index}": {"type": "boolean"} for index in range(6)}
    schema = {"type": "object", "properties": keys, "required": sorted(keys), "additionalProperties": False}
    result = tiny_bundled.generate(
        "x = ",
        grammar=Grammar.json_schema(schema, compact=True),
        max_new_tokens=200,
        drafter_options={"nodes": 16, "sources": "grammar"},
    )
    assert list(json.loads(result.text)) == sorted(keys)
    assert result.stats.accepted_by["grammar"] > 0.6 * len(result.tokens)
    assert result.stats.accepted > 0.9 * result.stats.drafted


def test_auto_drafts_nothing_that_the_grammar_forbids(llm: LLM, grammars: Grammars) -> None:
    """Neither do prompt lookup and the guesses of lookahead; a window may leave the grammar."""
    grammar = GRAMMARS["regex"]
    for drafter, options in (("auto", {"nodes": 12}), ("prompt_lookup", {}), ("recycling", {}), ("lookahead", {})):
        seen = []
        ((request, _),) = llm.requests(
            ["Add 12 34 Add 12 34 Add 12"],
            {"grammar": grammar, "max_new_tokens": 40, "drafter": drafter, "drafter_options": options},
        )
        handle = llm.engine.submit(replace(request, on_step=seen.append))
        llm.engine.run([handle])
        checked = state(grammars, grammar)
        for step in seen:
            done = handle.tokens[: step.position + 1 - len(request.tokens)]
            for node, source in enumerate(step.proposal.sources or [drafter] * len(step.tree)):
                if node and source != "window":
                    path = step.tree.path_tokens(node)
                    assert checked.admitted(0, done + path) >= len(done + path) - (path[-1] == 0), (drafter, path)
        assert drafter != "auto" or any(len(step.tree) > 1 for step in seen)


class Distracted(ToyTarget):
    """The same table as a plain one, and a token that it likes best everywhere."""

    token = 0

    def row(self, attended: Any) -> Any:
        found = super().row(attended).copy()
        found[self.token] += 100.0
        return found


@pytest.mark.parametrize(("drafter", "sampling"), [("ouroboros", GREEDY), ("ouroboros", SAMPLED), ("cascade", GREEDY)])
def test_draft_models_go_on_with_what_the_grammar_allows(
    drafter: str, sampling: dict[str, Any], tokenizer: Any
) -> None:
    """Where it forbids the favourite, the next candidate is drafted, and is what guesses are compared with."""
    draft = Distracted(len(tokenizer) + PADDING, order=1, sharpness=4.0)
    (draft.token,) = tokenizer.encode("@", add_special_tokens=False)
    llm = LLM(ToyTarget(len(tokenizer) + PADDING, order=1, sharpness=4.0), tokenizer=tokenizer)
    options: dict[str, Any] = {"grammar": Grammar.regex("[a-z ]{60}"), "max_new_tokens": 40, **sampling}
    options["drafter_options"] = {"draft": draft, "nodes": 4, "chain": True}
    alone, found = (llm.generate("number", drafter=name, **options) for name in ("draft_model", drafter))
    assert found.tokens == alone.tokens
    assert found.stats.accepted_by["draft"] > 10
    if not sampling:  # such a text repeats itself, so that guesses are right
        assert found.stats.drafter["draft"]["forwards"] < 0.9 * alone.stats.drafter["draft"]["forwards"]


# The state


def test_masks_of_branches(grammars: Grammars, tokenizer: Any) -> None:
    """llguidance's matcher keeps a mask when it goes back, and gives it again in another branch."""
    first, second = tokenizer.encode("(q", add_special_tokens=False), tokenizer.encode("<q", add_special_tokens=False)
    ends = tokenizer.encode("!", add_special_tokens=False) + tokenizer.encode("?", add_special_tokens=False)
    followed = state(grammars, Grammar.lark(BRANCHES))
    for path, expected in ((first, [True, False]), (second, [False, True]), (first, [True, False])):
        assert followed.mask(0, path)[ends].tolist() == expected
    assert state(grammars, Grammar.lark(BRANCHES)).mask(0, second)[ends].tolist() == [False, True]


def test_a_draft_over_a_long_text_does_not_have_it_read_again(
    grammars: Grammars, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    compiled = grammars.compile(Grammar.json_schema({"type": "array", "items": {**row, "additionalProperties": False}}))
    text = tokenizer.encode('[{"name": "a"}, {"name": "b"}, {"name": "c"}, {"name": "d"}]', add_special_tokens=False)
    made, matcher = list[object](), compiled.matcher
    monkeypatch.setattr(compiled, "matcher", lambda: made.append(None) or matcher())
    committed: list[int] = []
    followed = compiled.follow(committed, 400)
    for place, token in enumerate(text):
        for path in ([], text[place : place + 2], [token], text[place : place + 1] * 2):  # drafts, right and wrong
            mask = followed.mask(place, path)
            assert (mask == compiled.follow([], 400).mask(0, [*committed, *path])).all()
            made.pop()
        committed.append(token)
    assert len(made) == 1  # of the text itself


def test_grammars_in_which_llguidance_does_not_go_back(grammars: Grammars, tokenizer: Any) -> None:
    """A matcher that was to go back in a lexeme with max_tokens or stop begins again."""
    a, b, minus = (tokenizer.encode(text, add_special_tokens=False) for text in "ab-")
    followed = state(grammars, Grammar.lark(LIMITED))
    for path in ([*a, *b, *minus, *a], [*a, *a], [*a, *b, *a], a, [*b, *minus]):
        assert followed.admitted(0, path) == len(path), followed.problem
    fresh = state(grammars, Grammar.lark(LIMITED))
    assert (followed.mask(0, a) == fresh.mask(0, a)).all()
    assert not followed.problem


def test_there_may_be_thousands_of_choices(grammars: Grammars, tokenizer: Any) -> None:
    choices = [f"{number:05}" for number in range(0, 30_000, 3)]
    followed = state(grammars, Grammar.choices(choices))
    (nine,) = tokenizer.encode("9", add_special_tokens=False)
    path = tokenizer.encode("0000", add_special_tokens=False)
    allowed = followed.mask(0, path)
    assert not followed.problem
    assert [tokenizer.decode([token]) for token in np.flatnonzero(allowed)] == ["0", "3", "6", "9"]
    assert followed.ended(0, [*path, nine])


def test_a_text_in_which_llguidance_does_not_go_back_is_not_read_again(
    grammars: Grammars, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = grammars.compile(Grammar.lark('start: (word "-")+\nword[max_tokens=6]: /[ab]+/'))
    text = tokenizer.encode("aab-ba-b-abb-a-" * 8, add_special_tokens=False)
    committed: list[int] = []
    followed = compiled.follow(committed, 400)
    made, matcher = list[object](), compiled.matcher
    for place, token in enumerate(text):
        monkeypatch.setattr(compiled, "matcher", lambda: made.append(None) or matcher())
        paths = ([], text[place : place + 2], [token], text[place : place + 1] * 2)  # drafts, right and wrong
        masks = [followed.mask(place, path) for path in paths]
        monkeypatch.setattr(compiled, "matcher", matcher)
        for path, mask in zip(paths, masks, strict=True):
            assert (mask == compiled.follow([], 400).mask(0, [*committed, *path])).all()
        committed.append(token)
    assert not followed.problem
    assert len(made) == 1


@pytest.mark.slow
@settings(max_examples=60)
@given(data=st.data())
def test_masks_do_not_depend_on_the_branches_before(grammars: Grammars, data: Any) -> None:
    larks = [Grammar.lark(BRANCHES), Grammar.lark(LIMITED)]
    kinds = [*larks, Grammar.json_schema(EITHER), GRAMMARS["schema"], GRAMMARS["gbnf"]]
    grammar = data.draw(st.sampled_from(kinds))
    committed: list[int] = []
    followed = state(grammars, grammar, committed)
    for _ in range(data.draw(st.integers(1, 4))):
        paths: list[list[int]] = [[]]
        for _ in range(data.draw(st.integers(2, 10))):
            path = data.draw(st.sampled_from(paths))
            mask = followed.mask(len(committed), path)
            assert (mask == state(grammars, grammar).mask(0, [*committed, *path])).all()
            if data.draw(st.booleans()):
                followed.forced(len(committed), path)
            if mask[1:].any() and not mask[1:].all():
                paths.append([*path, data.draw(st.sampled_from((np.flatnonzero(mask[1:]) + 1).tolist()))])
        committed += paths[-1]


@settings(max_examples=60)
@given(data=st.data())
def test_answers_depend_on_the_prefix_only(grammars: Grammars, data: Any) -> None:
    """Not on what was asked before, nor on how much of the prefix is committed."""
    grammar = data.draw(
        st.sampled_from([GRAMMARS["compact"], GRAMMARS["lark"], GRAMMARS["regex"], Grammar.lark(LIMITED)])
    )
    committed: list[int] = []
    followed = state(grammars, grammar, committed)
    for _ in range(data.draw(st.integers(1, 6))):
        path: list[int] = []
        for _ in range(data.draw(st.integers(0, 5))):
            allowed = np.flatnonzero(followed.mask(len(committed), path)).tolist()
            path.append(
                data.draw(st.sampled_from(allowed)) if data.draw(st.booleans()) else data.draw(st.integers(0, 350))
            )
        fresh = state(grammars, grammar)
        whole = [*committed, *path]
        mask = fresh.mask(0, whole)
        assert (followed.mask(len(committed), path) == mask).all()
        assert followed.forced(len(committed), path) == state(grammars, grammar).forced(0, whole)
        assert followed.ended(len(committed), path) == state(grammars, grammar).ended(0, whole)
        admitted = followed.admitted(len(committed), path)
        if admitted == len(path):
            for tokens in (list(range(0, 290, 3)), list(range(1, 400, 7)), list(range(60, 80))):
                assert followed.allows(len(committed), path, tokens) == mask[tokens].tolist()
        committed += path[:admitted]


def test_the_end_of_a_text_is_allowed_exactly_when_the_grammar_may_stop(grammars: Grammars, tokenizer: Any) -> None:
    grammar = Grammar.regex("[ab]{2,3}")
    a = tokenizer.encode("a")[0]
    followed = state(grammars, grammar)
    assert [followed.mask(0, [a] * length)[0] for length in range(4)] == [False, False, True, True]
    assert [followed.ended(0, [a] * length) for length in range(4)] == [False, False, False, True]
    assert not followed.mask(0, [])[len(tokenizer) :].any()  # rows without a token
    assert followed.mask(0, [a, a, a]).sum() == 1  # the end alone
    assert followed.admitted(0, [a, a, 0, a]) == 2
    assert not followed.ended(0, [a, a, 0])


def test_a_complete_text_ends_without_a_further_forward(llm: LLM) -> None:
    result = llm.generate("a", grammar=Grammar.regex("[0-9]{12}"), drafter="plain", max_new_tokens=50)
    assert (result.finish_reason, result.tokens[-1] != 0, len(result.text)) == ("stop", True, 12)
    assert llm.generate("a", grammar=Grammar.regex("[0-9]{12}"), max_new_tokens=3).finish_reason == "length"
    exactly = len(result.tokens)
    assert llm.generate("a", grammar=Grammar.regex("[0-9]{12}"), max_new_tokens=exactly).finish_reason == "stop"
    longer = llm.generate("a", grammar=Grammar.regex("[a-z]*"), min_new_tokens=9, max_new_tokens=30)
    assert len(longer.tokens) >= 9
    assert llm.generate("a", grammar=Grammar.choices(["b"]), min_new_tokens=9, max_new_tokens=30).text == "b"


@pytest.mark.parametrize("grammar", [Grammar.lark('?start: a\na: "b::="'), Grammar.choices(["b::=", "\x7f"])], ids=str)
def test_what_could_be_taken_for_another_syntax(grammars: Grammars, tokenizer: Any, grammar: Grammar) -> None:
    state = grammars.compile(grammar).follow([], len(tokenizer))
    assert state.allows(0, [], tokenizer.encode("b", add_special_tokens=False)) == [True]


# What is refused


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Grammar.regex(r"[^\s\S]"), "regular expression .* matches no text"),
        (Grammar.regex("x{0}"), "matches the empty text only"),
        (Grammar.regex("(a"), "regular expression cannot be compiled: .*unclosed group"),
        (Grammar.regex(r"(a)\1"), "backreferences are not supported"),
        (Grammar.regex("(?=a)b"), "look-around"),
        (Grammar.json_schema({"type": "integer", "minimum": 5, "maximum": 3}), "minimum .* is greater than maximum"),
        (Grammar.json_schema({"type": "object", "dependentSchemas": {}}), "dependentSchemas"),
        (Grammar.json_schema({"$ref": "http://example.org/x"}), "JSON schema cannot be compiled"),
        (Grammar.json_schema({"type": "nothing"}), "JSON schema cannot be compiled"),
        (Grammar.lark("start: missing"), "unknown name"),
        (Grammar.lark("beginning: /a/"), "no start rule"),
        (Grammar.lark('root ::= "a'), "grammar cannot be compiled"),
        (Grammar.json_schema({"enum": [f"value {n}" for n in range(100_000)]}), "too big"),
        (Grammar.json_schema(json.loads('{"items":' * 300 + "{}" + "}" * 300)), "recursion limit"),
    ],
    ids=lambda each: str(each)[:40],
)
def test_a_grammar_that_cannot_serve_is_one_sentence(grammars: Grammars, grammar: Grammar, message: str) -> None:
    began = time.perf_counter()
    with pytest.raises(BadParameter, match=message) as caught:
        grammars.compile(grammar)
    assert "\n" not in str(caught.value)
    assert time.perf_counter() - began < 5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Grammar.json_schema("{"), "is not JSON"),
        (lambda: Grammar.json_schema({"a": float("nan")}), "is not JSON"),
        (lambda: Grammar.json_schema({"a": object()}), "is not JSON"),
        (lambda: Grammar.json_schema([1]), "must be an object or a boolean, got list"),  # type: ignore[arg-type]
        (lambda: Grammar.json_schema(False), "matches no text"),
        (lambda: Grammar.regex(""), "not empty"),
        (lambda: Grammar.regex(3), "got 3"),  # type: ignore[arg-type]
        (lambda: Grammar.regex("\ud800"), "lone surrogate"),
        (lambda: Grammar.regex("a" * 2_000_001), "2000001 characters"),
        (lambda: Grammar.choices([]), "at least one"),
        (lambda: Grammar.choices("yes"), "list of texts"),
        (lambda: Grammar.choices(["yes", ""]), "not empty"),
        (lambda: SamplingParams(grammar="x"), "compiled grammar"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_grammar_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(BadParameter, match=message):
        make()


def test_options_that_do_not_go_with_a_grammar(llm: LLM) -> None:
    grammar = GRAMMARS["regex"]
    with pytest.raises(BadParameter, match=r"must be a leapahead\.Grammar"):
        llm.generate("a", grammar={"type": "object"})  # type: ignore[call-overload]
    with pytest.raises(BadParameter, match="2 grammars for 1 prompt is not possible"):
        llm.generate("a", grammar=[grammar, grammar])
    with pytest.raises(BadParameter, match="ignore_eos=True is not possible with a grammar"):
        llm.generate("a", grammar=grammar, ignore_eos=True)


@pytest.mark.parametrize(
    "pattern", [r"(a{1,1000}){1,1000}b", r"(.*a.{40})", r"((a|b)*c){200}", r"(x+x+)+y", r"(\w{1,500} ){1,500}\."]
)
def test_a_regex_bomb_ends_soon(llm: LLM, pattern: str) -> None:
    """With a text or with one sentence, and the next request is served."""
    began = time.perf_counter()
    with suppress(LeapaheadError):
        llm.generate("a", grammar=Grammar.regex(pattern), max_new_tokens=30, temperature=1.0, seed=0)
    assert time.perf_counter() - began < 10
    assert llm.generate("a", grammar=Grammar.choices(["fine"])).text == "fine"


def test_a_limit_that_is_reached_ends_this_request_only(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from leapahead.grammar import compiled

    monkeypatch.setitem(compiled.LIMITS, "step_max_items", 2)
    monkeypatch.setattr(compiled, "KEPT", 64)
    with pytest.raises(LeapaheadError, match=r"became too complex to follow|matches no text"):
        llm.generate("a", grammar=Grammar.lark('start: "(" start ")" start | start start | /[a-z]/'), max_new_tokens=50)
    monkeypatch.undo()
    assert llm.generate("a", grammar=Grammar.choices(["fine"])).text == "fine"


# Tokenizers


def test_a_grammar_that_is_being_compiled_delays_no_other(tokenizer: Any) -> None:
    """Which may take seconds, within the limits."""
    begun, other = Event(), Event()

    class Slow(str):
        __hash__ = str.__hash__

        def __eq__(self, kind: object) -> bool:
            begun.set()
            return other.wait(10) and str.__eq__(self, kind)

    grammars = Grammars(tokenizer, len(tokenizer), (0,))
    slow = Thread(target=grammars.compile, args=(Grammar(Slow("regular expression"), "a+"),))
    slow.start()
    assert begun.wait(10)
    done = Thread(target=lambda: (grammars.compile(GRAMMARS["regex"]), other.set()))
    done.start()
    done.join(5)
    assert other.is_set()
    other.set()
    slow.join()


def test_tokenizers_that_cannot_serve_are_refused_by_name(tokenizer: Any) -> None:
    with pytest.raises(Refused, match="needs a tokenizer"):
        LLM(ToyTarget(300)).generate([1], grammar=GRAMMARS["regex"])
    with pytest.raises(Refused, match="Spelling does not tell the bytes of its tokens"):
        Grammars(Spelling(chr), 300, (0,)).compile(GRAMMARS["regex"])  # type: ignore[arg-type]
    with pytest.raises(Refused, match="names none"):
        Grammars(tokenizer, 300, ()).compile(GRAMMARS["regex"])
    pieces = deepcopy(tokenizer)
    pieces.backend_tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(Refused, match=r"decoder: WordPiece\) does not tell the bytes of its tokens; fast tokenizers"):
        Grammars(pieces, 300, (0,)).compile(GRAMMARS["regex"])


class ByteFallback:
    """A tokenizer of SentencePiece's kind, as the `tokenizers` library describes it."""

    def __init__(self, model: Any) -> None:
        self.tokenizer = Tokenizer(model)
        self.tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        self.tokenizer.add_special_tokens(["<s>"])

    def description(self) -> str:
        return self.tokenizer.to_str()


PIECES = {"<unk>": 0, "<s>": 1, "<0xF0>": 2, "<0x0A>": 3, "\u2581a": 4, "b": 5, "\u00e9": 6}


@pytest.mark.parametrize("kind", ["byte-level", "BPE", "Unigram"])
def test_the_bytes_of_tokens_are_those_that_llguidance_reads(tokenizer: Any, kind: str) -> None:
    """They are read without it, as the server needs them."""
    from llguidance import LLTokenizer

    if kind == "byte-level":
        found, special = token_bytes(tokenizer)
        known = LLTokenizer(tokenizer.backend_tokenizer.to_str())
        assert special == [0]
    else:
        unigram = models.Unigram([(piece, -1.0) for piece in PIECES], unk_id=0, byte_fallback=True)
        own: Any = ByteFallback(unigram if kind == "Unigram" else models.BPE(PIECES, [], byte_fallback=True))
        found, special = token_bytes(own)
        known = LLTokenizer(own.description())
        assert (found[2:], special) == ([b"\xf0", b"\n", b" a", b"b", "\u00e9".encode()], [1])
    read = [known.decode_bytes([token]) for token in range(known.vocab_size)]
    assert [piece.removeprefix(b"\xff") for piece in found] == read  # the byte that marks its special tokens


def test_the_bytes_of_added_tokens_are_those_of_their_texts(tokenizer: Any) -> None:
    """As of Gemma's runs of spaces, which llguidance reads otherwise."""
    own: Any = ByteFallback(models.BPE(PIECES, [], byte_fallback=True))
    own.tokenizer.add_tokens([AddedToken("\u2581\u2581", normalized=False)])
    spaces, decode = own.tokenizer.token_to_id("\u2581\u2581"), own.tokenizer.decode
    found = token_bytes(own)[0]
    assert found[spaces] == b"  " == decode([4, spaces])[len(decode([4])) :].encode()
    added = deepcopy(tokenizer)
    added.add_tokens([AddedToken("\u65e5 \u672c", normalized=False), AddedToken("<think>", normalized=False)])
    found, special = token_bytes(added)
    assert [piece.decode() for piece in found[-2:]] == ["\u65e5 \u672c", "<think>"]
    assert [added.decode([len(found) - back]) for back in (2, 1)] == ["\u65e5 \u672c", "<think>"]
    assert special == [0]


@pytest.mark.parametrize("special", [False, True])
def test_text_that_reads_like_an_added_token_is_text(tokenizer: Any, special: bool) -> None:
    """An added token that is special is never chosen for it; another one is a token like others."""
    added = deepcopy(tokenizer)
    added.add_tokens([AddedToken("<think>", special=special)])
    own = LLM(ToyTarget(len(added), sharpness=2.0), tokenizer=added)
    for grammar in (Grammar.choices(["<think>a</think>"]), Grammar.regex("<think>[ab]</think>")):
        for drafter in ("plain", "auto"):
            result = own.generate("a", grammar=grammar, drafter=drafter)
            assert added.decode(result.tokens) in ("<think>a</think>", "<think>b</think>")
            assert (added.encode("<think>")[0] in result.tokens) is not special


def test_a_text_that_has_left_its_grammar_ends_with_an_error(grammars: Grammars) -> None:
    committed = [1]
    followed = state(grammars, GRAMMARS["regex"], committed)
    committed.append(2)  # never chosen under the grammar
    assert not followed.mask(2, []).any()
    assert "does not allow the text" in followed.problem


def test_without_llguidance_the_extra_is_named(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(LeapaheadError, match=r"needs llguidance, .*leapahead\[grammar\]"):
        Grammars(tokenizer, 300, (0,)).compile(GRAMMARS["regex"])


def test_a_grammar_is_compiled_once(grammars: Grammars) -> None:
    one = grammars.compile(Grammar.choices(["a", "b"]))
    assert grammars.compile(Grammar.choices(["a", "b"])) is one
    assert isinstance(one, CompiledGrammar)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["llama.cpp", "openvino"])
def test_other_engines(engine: str, tmp_path: Path) -> None:
    from leapahead.models import loading

    if engine == "llama.cpp":
        pytest.importorskip("llama_cpp")
        from leapahead.integrations import gguf

        model = tmp_path / "tiny.gguf"
        gguf.export_gguf(loading.bundled(), model, "f32")
        llm = LLM(str(model), n_ctx=512, n_threads=1)
    else:
        pytest.importorskip("openvino_genai")
        from leapahead.models.openvino.export import export

        llm = LLM(str(export(loading.bundled(), tmp_path / "tiny", "f32").path), n_threads=1)
    with llm:
        for sampling in (GREEDY, SAMPLED):
            options: dict[str, Any] = {"grammar": GRAMMARS["schema"], "max_new_tokens": 150, **sampling}
            plain = llm.generate("A person: ", drafter="plain", **options)
            jsonschema.validate(json.loads(plain.text), PERSON)
            assert llm.generate("A person: ", drafter_options={"nodes": 12}, **options).tokens == plain.tokens
            assert llm.generate("A person: ", drafter="lookahead", **options).tokens == plain.tokens
            assert llm.tokenizer is not None
            spaced = llm.tokenizer.encode('{"a b" : " , x !"}', add_special_tokens=False)
            assert llm.tokenizer.decode(spaced) == '{"a b" : " , x !"}'
        several = llm.tokenizer.encode("日本 😀", add_special_tokens=False)
        assert b"".join(token_bytes(llm.tokenizer)[0][token] for token in several).decode() == "日本 😀"


# Transformers' generate


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["auto", "lookahead"])
@pytest.mark.parametrize("rows", [1, 3])
def test_generate_of_transformers_under_a_grammar(tiny_model: Any, tokenizer: Any, drafter: str, rows: int) -> None:
    import torch

    from leapahead import hf

    prompts = torch.tensor([tokenizer.encode(text)[:3] for text in ("def add", "for num", "return ")[:rows]])
    compiled = Grammars(tokenizer, tiny_model.config.vocab_size, (0,)).compile(GRAMMARS["regex"])

    def texts(**options: Any) -> list[str]:
        processor = GrammarProcessor(compiled, prompts.shape[1])
        found = tiny_model.generate(
            prompts, logits_processor=[processor], max_new_tokens=50, do_sample=False, pad_token_id=0, **options
        )
        return [tokenizer.decode(row[prompts.shape[1] :], skip_special_tokens=True) for row in found]

    expected = texts()
    assert texts(custom_generate=hf.generate, drafter=drafter) == expected
    assert all(re.match(r"[A-Z][a-z]{2,9}( [0-9]{2})", each) for each in expected)


def test_a_processor_keeps_few_masks(tokenizer: Any) -> None:
    """A host asks for every prefix of the text from its beginning on."""
    state = Grammars(tokenizer, len(tokenizer), (0,)).compile(Grammar.regex("[a-z ]*")).follow([], len(tokenizer))
    letter = tokenizer.encode("a", add_special_tokens=False)[-1:]
    masks = [state.mask(0, letter * length) for length in range(3 * MOST_MASKS)]
    assert len(state._masks) <= MOST_MASKS
    assert all(np.array_equal(masks[1], each) for each in masks[1:])


# The command line


def test_the_options_of_the_command_line(leapahead: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    schema, gbnf = tmp_path / "schema.json", tmp_path / "yes.gbnf"
    schema.write_text(json.dumps({"type": "integer", "minimum": 0, "maximum": 9}))
    gbnf.write_text(GBNF)

    def text(*options: str) -> str:
        found = leapahead("generate", "a", "-q", *options)
        assert found.exit_code == 0, found.stderr
        return str(found.stdout).strip()

    assert text("--json-schema", str(schema)) in "0123456789"
    assert text("--json-schema", schema.read_text()) in "0123456789"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert text("--json-schema=~/schema.json") in "0123456789"
    reader, writer = os.pipe()
    os.write(writer, schema.read_bytes())
    os.close(writer)
    assert text("--json-schema", f"/dev/fd/{reader}") in "0123456789"
    os.close(reader)
    assert text("--regex", "[xy]{4}").strip("xy") == ""
    assert text("--choice", "left", "--choice", "right") in ("left", "right")
    assert re.fullmatch(GBNF_AS_REGEX, text("--grammar", str(gbnf)))
    assert leapahead("generate", "a", "-q", "--json-object", "--compare", "--rounds", "1").exit_code == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--regex", "a", "--choice", "b"), "--regex and --choice cannot be given together"),
        (("--regex", "(a"), 'regular expression cannot be compiled: .*"(a".*unclosed group'),
        (("--json-schema", "missing.json"), "no such file"),
        (("--json-schema", "."), "no such file"),
        (("--json-schema", "long" * 100), "no such file"),
        (("--json-schema", "{"), "is not JSON"),
        (("--regex", "a", "--ignore-eos"), "--ignore-eos is not possible with a grammar"),
        (("--grammar", "missing.lark"), "does not exist"),
    ],
)
def test_wrong_options_of_the_command_line(leapahead: Any, options: tuple[str, ...], message: str) -> None:
    found = leapahead("generate", "a", *options)
    assert found.exit_code == 2
    assert re.search(message.replace("(a", r"\(a"), found.stderr)


@pytest.mark.slow
def test_nothing_of_a_request_outlives_it(tokenizer: Any) -> None:
    """Compiled objects are not seen by the garbage collector, so a cycle through one would live for ever."""

    def states() -> int:
        gc.collect()
        return sum(type(each) is State for each in gc.get_objects())

    with LLM(ToyTarget(len(tokenizer)), tokenizer=tokenizer) as llm:
        before = states()
        for _ in range(3):
            llm.generate("a", grammar=Grammar.json_object(), max_new_tokens=20)
        assert states() <= before + 1  # the last one's drafter may still be in a frame
