"""`leapahead.integrations.ray` without Ray: rows in, rows out, seeds, errors, and the exchange with an actor in place.

The jobs themselves are tested by tests/test_ray_jobs.py, where Ray is installed (`make test-ray`).
"""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace as Some
from typing import Any

import numpy as np
import pytest
from helpers import Spelling

from leapahead import LLM, BadParameter, ContextOverflow, LeapaheadError
from leapahead.drafters import cache_sections
from leapahead.drafters.cache import DrafterCache
from leapahead.drafters.sources.past_texts import PastTexts
from leapahead.integrations.ray import MOST_FAILURES, DrafterCacheActor, Generate, drafter_cache_actor, row_seed
from leapahead.models.toy import ToyTarget

RESULTS = ("text", "tokens", "finish_reason", "error")  # the acceptance length depends on what was learned


def objects(values: Sequence[Any]) -> Any:
    """A column as Ray gives it: an array of objects."""
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


def made(**options: Any) -> Generate:
    llm = {"drafter": "suffix", **options.pop("llm", {})}
    return Generate(ToyTarget(context_length=300), **{"llm": llm, "max_new_tokens": 12, **options})


PROMPTS: list[Any] = [[1, 2, 3], [2, 3], [5], [4, 4, 4, 4], [1, 2, 3], [7, 1]]


def table(found: dict[str, Any], *, key: str = "row_id") -> dict[Any, tuple[Any, ...]]:
    """Row id -> results."""
    return {found[key][n]: tuple(found[name][n] for name in RESULTS) for n in range(len(found[key]))}


def in_batches(generate: Generate, order: Sequence[int], size: int) -> dict[Any, tuple[Any, ...]]:
    rows: dict[Any, tuple[Any, ...]] = {}
    for first in range(0, len(order), size):
        some = order[first : first + size]
        batch = {"row_id": np.array(some), "prompt": objects([PROMPTS[index] for index in some])}
        rows |= table(generate(batch))
    return rows


# --------------------------------------------------------------------------------------------------- rows and seeds


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_do_not_depend_on_order_batches_or_what_was_decoded_before(temperature: float) -> None:
    generate = made(temperature=temperature, seed=3)
    rows = in_batches(generate, range(6), 6)
    assert in_batches(generate, [5, 3, 1, 4, 2, 0], 2) == rows
    assert in_batches(made(temperature=temperature, seed=3), [2, 0, 4, 1, 3, 5], 1) == rows
    llm = LLM(ToyTarget(), drafter="plain")
    for index, prompt in enumerate(PROMPTS):
        plain = llm.generate(prompt, max_new_tokens=12, temperature=temperature, seed=row_seed(3, index))
        assert rows[index] == (plain.text, plain.tokens, plain.finish_reason, "")
    if temperature:
        assert rows[0] != rows[4]  # equal prompts, different row ids
        assert in_batches(made(temperature=temperature, seed=4), range(6), 6) != rows


def test_without_row_ids_the_prompt_decides() -> None:
    generate = made(temperature=1.0, seed=3)
    found = generate({"n": np.arange(6), "prompt": objects(PROMPTS)})
    rows = table(found, key="n")
    assert rows[0] == rows[4]
    again = generate({"n": np.array([5, 0]), "prompt": objects([PROMPTS[5], np.array(PROMPTS[0])])})
    assert table(again, key="n") == {5: rows[5], 0: rows[0]}
    assert found["acceptance_length"].dtype == np.float64
    assert (found["acceptance_length"] >= 1.0).all()
    for name in ("prompt", "tokens"):  # of arrays, Ray would make tensors
        assert all(isinstance(each, list) for each in generate({"prompt": np.array([[1, 2], [3, 4]])})[name])


def test_a_seed_of_the_row_itself_counts() -> None:
    generate, llm = made(temperature=1.0), LLM(ToyTarget(), drafter="plain")
    batch = {"prompt": np.array([[1, 2], [1, 2], [1, 2]]), "seed": np.array([7.0, np.nan, 8.0])}
    found = generate(batch)
    seeds = [7, row_seed(0, [1, 2]), 8]
    assert list(found["tokens"]) == [
        llm.generate([1, 2], max_new_tokens=12, temperature=1.0, seed=seed).tokens for seed in seeds
    ]


def test_a_seed_is_a_function_of_the_row_id_alone() -> None:
    assert row_seed(0, 5) == row_seed(0, 5) != row_seed(1, 5)
    assert row_seed(0, "5") != row_seed(0, 5)
    assert row_seed(0, 5) == 8843522975208619054  # the same in every version and on every machine
    assert row_seed(0, 5.0) == row_seed(0, 5) != row_seed(0, 5.5)
    seeds = {row_seed(seed, identity) for seed in range(20) for identity in range(500)}
    assert len(seeds) == 10_000
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_row_has_its_seed_whatever_is_missing_beside_it() -> None:
    generate = made(temperature=1.0)
    whole = generate({"prompt": np.array([[1, 2]]), "row_id": np.array([2])})
    beside = generate({"prompt": np.array([[1, 2], [1, 2]]), "row_id": np.array([2, np.nan])})  # Arrow's [2, null]
    assert list(beside["tokens"]) == [whole["tokens"][0], []]


def test_rows_of_every_kind(tokenizer: Any) -> None:
    """Text, token ids and chats in one column of objects, whose messages have the fields of all of them."""
    target = ToyTarget(vocab_size=len(tokenizer))
    generate = Generate(target, llm={"tokenizer": tokenizer}, max_new_tokens=5)
    llm = LLM(target, tokenizer=tokenizer)
    chat = [{"role": "user", "content": "Hi", "name": None}]
    prompts: list[Any] = ["def", np.str_("x"), np.array([5, 6]), np.array(chat, dtype=object), chat]
    found = generate({"prompt": objects(prompts), "max_new_tokens": np.array([3, np.nan, 4, 5, 6])})
    expected = [
        llm.generate(prompt, max_new_tokens=length)
        for prompt, length in zip(["def", "x", [5, 6], chat, chat], (3, 5, 4, 5, 6), strict=True)
    ]
    assert list(found["error"]) == [""] * 5
    assert list(found["tokens"]) == [result.tokens for result in expected]
    assert list(found["text"]) == [result.text for result in expected]


def test_predictions_of_rows() -> None:
    text = LLM(ToyTarget()).generate([1, 2, 3], max_new_tokens=12).tokens
    generate = made(llm={"drafter": "prediction"})
    batch = {"prompt": np.array([[1, 2, 3]] * 3), "prediction": objects([text, None, np.array(text[::-1])])}
    found = generate(batch)
    assert list(found["tokens"]) == [text] * 3
    assert found["acceptance_length"][0] > found["acceptance_length"][1] == 1.0
    with pytest.raises(BadParameter, match="drafter 'plain' makes no use of a prediction"):
        made(llm={"drafter": "plain"})(batch)


def test_the_columns_may_have_other_names() -> None:
    names = {"prompt": "question", "row_id": "uuid", "text": "answer", "error": "problem"}
    found = made(columns=names)({"question": np.array([[1, 2]]), "uuid": np.array(["a"]), "text": np.array(["kept"])})
    assert {"question", "uuid", "text", "answer", "tokens", "finish_reason", "acceptance_length", "problem"} == set(
        found
    )
    assert list(found["text"]) == ["kept"]


# ------------------------------------------------------------------------------------------------------------ errors

BAD_ROWS: list[tuple[Any, str]] = [
    ([], "the prompt is empty; give some text, or at least one token id"),
    (None, "the prompt is missing"),
    (3.5, "a prompt must be text, a list of token ids or chat messages, got float"),
    ([[1, 2], [3]], "a row takes one prompt"),
    ([1, 999], "the prompt's token id 999 is outside the vocabulary of"),
    ([1] * 5000, "the prompt has 5000 tokens and the context of"),
    ("text", "a text prompt needs a tokenizer"),
    ([{"role": "user", "content": "Hi"}], "chat messages need a tokenizer"),
]


def test_a_bad_row_ends_alone() -> None:
    generate = made()
    good = generate({"prompt": objects([[1, 2, 3], [2, 3]])})
    prompts = [[1, 2, 3], *(prompt for prompt, _ in BAD_ROWS), [2, 3]]
    found = generate({"prompt": objects(prompts)})
    assert list(found["tokens"]) == [good["tokens"][0], *([[]] * len(BAD_ROWS)), good["tokens"][1]]
    for index, (_, message) in enumerate(BAD_ROWS, 1):
        assert message in found["error"][index]
        assert "\n" not in found["error"][index]
        assert (found["finish_reason"][index], found["text"][index]) == ("error", "")
        assert np.isnan(found["acceptance_length"][index])


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("seed", -1, "seed"),
        ("seed", 0.5, "seed=0.5 is not possible: it must be a whole number"),
        ("max_new_tokens", 0, "max_new_tokens=0 is not possible"),
        ("max_new_tokens", "many", "max_new_tokens='many' is not possible"),
        ("prediction", [1, 999], "the prediction has 999"),
        ("row_id", None, "the row id is missing"),
        ("row_id", 2.0**53, "does not tell numbers of this size apart"),
        ("row_id", b"7", "cannot be derived from b'7' (Object of type bytes is not JSON serializable)"),
    ],
)
def test_a_bad_value_beside_a_prompt_ends_its_row(column: str, value: Any, message: str) -> None:
    good = {"seed": 1, "max_new_tokens": 3, "prediction": [1], "row_id": 7}[column]
    batch = {"prompt": np.array([[1, 2], [1, 2]]), column: objects([value, good])}
    found = made(llm={"drafter": "auto"}, temperature=1.0)(batch)
    assert message in found["error"][0]
    assert found["error"][1] == ""
    assert len(found["tokens"][1]) > 0


def test_an_error_while_decoding_ends_its_row() -> None:
    """Logits from which nothing can be chosen, in one row of three."""

    def ban(tokens: Any, logits: Any) -> Any:
        return np.where(np.asarray(tokens)[:, :1] == 5, np.nan, logits)

    found = made(logits_processors=[ban])({"prompt": objects([[1, 2], [5, 2], [2, 3]])})
    assert [bool(error) for error in found["error"]] == [False, True, False]
    assert [len(tokens) for tokens in found["tokens"]] == [12, 0, 12]


def test_what_no_row_causes_is_raised_and_leaves_nothing_behind() -> None:
    """So that Ray may retry it: an error of the forward, or of the user's own function."""

    def broken(tokens: Any, logits: Any) -> Any:
        raise RuntimeError("out of memory")

    generate = made(logits_processors=[broken])
    with pytest.raises(RuntimeError, match="out of memory"):
        generate({"prompt": objects([[1, 2], [5, 2]])})
    assert generate.llm.engine.lengths() == []


def test_a_machine_without_memory_is_no_error_of_a_row() -> None:
    """Targets tell it as a `LeapaheadError`. As a row, it would be missing in a job that has succeeded."""

    class Full(ToyTarget):
        def step(self, *_: Any, **__: Any) -> Any:
            raise LeapaheadError("out of memory in a step at 3 tokens of context")

    generate = Generate(Full(context_length=300), llm={"drafter": "plain"}, max_new_tokens=12)
    with pytest.raises(LeapaheadError, match="out of memory in a step"):
        generate({"prompt": objects([[1, 2], [5, 2]])})
    assert generate.llm.engine.lengths() == []


@pytest.mark.parametrize(("prompt", "kind"), [([], BadParameter), ([1] * 5000, ContextOverflow), (None, BadParameter)])
def test_errors_are_raised_where_that_is_asked_for(prompt: Any, kind: type[Exception]) -> None:
    generate = made(errors="raise")
    with pytest.raises(kind):
        generate({"prompt": objects([[1, 2], prompt])})
    assert generate.llm.engine.lengths() == []


def test_a_batch_of_bad_rows_and_an_empty_batch() -> None:
    found = made()({"prompt": objects([[], []])})
    assert list(found["finish_reason"]) == ["error", "error"]
    assert all(len(column) == 0 for column in made()({"prompt": objects([])}).values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 2}, "n=2 is not possible: a row has one text"),
        ({"logprobs": 3}, "logprobs=3 is not possible"),
        ({"errors": "ignore"}, "errors='ignore' is not possible: it must be one of column, raise"),
        ({"seed": -1}, "seed=-1 is not possible"),
        ({"temprature": 1}, "did you mean 'temperature'"),
        ({"temperature": -1}, "temperature"),
        ({"columns": {"prompts": "p"}}, "the key must be one of prompt, row_id"),
        ({"columns": {"prompt": "text"}}, "two of them have the same name"),
        ({"columns": 3}, "columns=3 is not possible: it must be a dictionary of names and values"),
        ({"exchange": "leapahead-drafter-cache"}, "give it what drafter_cache_actor"),
        ({"exchange": object(), "exchange_every": 0}, "exchange_every=0 is not possible"),
        ({"exchange": object(), "llm": {"drafter_cache": False}}, "keeps nothing that could be exchanged"),
        ({"llm": {"drafter": "sufix"}}, "sufix"),
        ({"acceptance": "lossy-typical"}, "acceptance='lossy-typical.*' is not possible in a job: its texts depend on"),
        (
            {"llm": {"drafter": "speculative_sampling", "draft": ToyTarget()}, "temperature": 1.0},
            "the drafter 'speculative_sampling' is not possible in a job",
        ),
    ],
)
def test_bad_arguments_are_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(LeapaheadError, match=message):
        made(**options)


def test_bad_options_are_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(BadParameter, match=r"top_p=2\.0 is not possible"):
        Generate(str(tmp_path / "no model"), top_p=2.0)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"question": [1]}, "there is no column 'prompt' for the prompt; the data set has question"),
        ({"prompt": [[1]], "error": [""]}, "has a column 'error' already, which would be overwritten"),
        ([1, 2], "a batch must be a dictionary of numpy arrays, got list"),
    ],
)
def test_a_batch_without_the_right_columns_is_refused(batch: Any, message: str) -> None:
    with pytest.raises(BadParameter, match=message):
        made()(batch)
    if isinstance(batch, dict):
        with pytest.raises(BadParameter, match="there is no column 'uuid' for the row_id"):
            made(columns={"row_id": "uuid"})({"prompt": [[1]]})


def test_the_model_s_arguments_are_a_dictionary() -> None:
    with pytest.raises(BadParameter, match="llm='auto' is not possible: it must be a dictionary of names and values"):
        Generate(ToyTarget(), llm="auto")  # type: ignore[arg-type]


def test_importing_it_imports_neither_ray_nor_a_model() -> None:
    code = (
        "import sys, leapahead.integrations.ray\n"
        "print(*sorted({'ray', 'torch', 'transformers', 'llama_cpp'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("", "")


def test_without_ray_the_actor_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(LeapaheadError, match=r'drafter_cache_actor needs ray.*pip install "leapahead\[ray\]"'):
        drafter_cache_actor()


def test_an_actor_that_outlives_its_job_is_in_a_namespace_that_later_jobs_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray gives each job that names no namespace one of its own, so that no later job found the actor."""

    def namespace_of(**options: Any) -> Any:
        given: dict[str, Any] = {}
        fake = Some(
            remote=lambda kind: Some(options=lambda **chosen: given.update(chosen) or Some(remote=lambda: None))
        )
        monkeypatch.setitem(sys.modules, "ray", fake)
        drafter_cache_actor(**options)
        return given.get("namespace")

    assert namespace_of(lifetime="detached") == "leapahead"
    assert namespace_of(lifetime="detached", namespace="team") == "team"
    assert namespace_of() is None


# ------------------------------------------------------------------------------------------------------ the exchange


class Reference:
    """As Ray's `ObjectRef`."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def future(self) -> Future[Any]:
        return self._future


class FakeActor:
    """A handle of the actor whose replies come when they are told to, or not at all."""

    def __init__(self, prompt: bool = True) -> None:
        self.actor, self.prompt, self.alive = DrafterCacheActor(), prompt, True
        self.calls, self.waiting = 0, list[tuple[Future[Any], bytes]]()
        self.exchange = self  # so that exchange.remote(...) works

    def remote(self, data: bytes) -> Reference:
        self.calls += 1
        future: Future[Any] = Future()
        self.waiting.append((future, data))
        if self.prompt:
            self.reply()
        return Reference(future)

    def reply(self) -> None:
        for future, data in self.waiting:
            try:
                if not self.alive:
                    raise ConnectionError("The actor died.\nIts log is long.")
                future.set_result(self.actor.exchange(data))
            except Exception as error:
                future.set_exception(error)
        self.waiting = []


BATCH = {"prompt": np.array([[1, 2, 3]]), "max_new_tokens": np.array([40])}


def test_a_replica_drafts_from_what_another_one_has_seen() -> None:
    hub = FakeActor()
    one, two, alone = made(exchange=hub, exchange_every=1), made(exchange=hub, exchange_every=1), made()
    first = one(BATCH)
    second, without = two(BATCH), alone(BATCH)
    assert list(second["tokens"]) == list(first["tokens"]) == list(without["tokens"])
    fresh = made(exchange=hub)(BATCH)  # a replica that starts later, or again
    assert second["acceptance_length"][0] == without["acceptance_length"][0]  # it sent its first request before
    assert two(BATCH)["acceptance_length"][0] > 1.5 * without["acceptance_length"][0]
    assert fresh["acceptance_length"][0] > 1.5 * without["acceptance_length"][0]
    assert list(fresh["tokens"]) == list(first["tokens"])


def test_an_exchange_comes_every_n_batches() -> None:
    hub = FakeActor()
    generate = made(exchange=hub, exchange_every=3)
    calls = []
    for _ in range(7):
        generate(BATCH)
        calls.append(hub.calls)
    assert calls == [1, 1, 2, 2, 2, 3, 3]


def test_a_reply_that_does_not_come_is_not_waited_for() -> None:
    hub = FakeActor(prompt=False)
    generate = made(exchange=hub, exchange_every=1)
    for _ in range(3):
        generate(BATCH)
    assert hub.calls == 1  # no further one is sent meanwhile
    hub.actor.exchange(made_cache([9, 9, 9]).to_bytes())
    hub.reply()
    generate(BATCH)
    assert generate.llm.drafter_cache is not None
    assert [9, 9, 9] in texts(generate.llm.drafter_cache)
    assert hub.calls == 2


def made_cache(text: Sequence[int]) -> DrafterCache:
    cache, llm = DrafterCache(), LLM(ToyTarget())
    cache.belong(cache_sections.vocabulary(None, llm.target.info.vocab_size), llm.target.info.vocab_size)
    cache.section("suffix", PastTexts).add(text)
    return cache


def texts(cache: DrafterCache) -> list[list[int]]:
    arrays = cache.section("suffix", PastTexts).arrays()
    ends = np.cumsum(arrays["lengths"])[:-1]
    return [part.tolist() for part in np.split(arrays["tokens"], ends)]


def test_a_dead_actor_is_survived_with_one_warning() -> None:
    hub = FakeActor()
    generate = made(exchange=hub, exchange_every=1)
    expected = generate(BATCH)
    hub.alive = False
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [generate(BATCH) for _ in range(8)]
    assert [str(each.message) for each in caught] == [
        "the exchange of drafter caches failed (The actor died.); this replica goes on with its own, and the texts "
        "stay the same"
    ]
    assert all(list(each["tokens"]) == list(expected["tokens"]) for each in found)
    assert hub.calls == 2 + MOST_FAILURES  # one more was answered before the actor died


def test_an_actor_that_comes_back_is_used_again() -> None:
    hub = FakeActor()
    generate = made(exchange=hub, exchange_every=1)
    generate(BATCH)
    hub.alive = False
    generate(BATCH)  # sends what it knows
    with pytest.warns(UserWarning, match="the exchange of drafter caches failed"):
        generate(BATCH)
    hub.actor, hub.alive = DrafterCacheActor(), True  # restarted, and empty
    for _ in range(3):
        generate(BATCH)
    assert hub.actor.figures()["exchanges"] >= 1
    assert len(hub.actor.state()) > 1000


def test_an_actor_of_another_vocabulary_is_survived() -> None:
    hub, other = FakeActor(), DrafterCache()
    other.belong("another", 7)
    hub.actor.exchange(other.to_bytes())
    generate = made(exchange=hub)
    with pytest.warns(UserWarning, match="belongs to a vocabulary of 12 and cannot be merged with"):
        found = generate(BATCH)
    assert list(found["error"]) == [""]


def test_what_the_actor_says_never_changes_a_text() -> None:
    hub = FakeActor()
    expected = made()(BATCH)["tokens"][0]
    rng = np.random.default_rng(0)
    for _ in range(20):  # the text's own beginnings, with wrong continuations
        start = int(rng.integers(len(expected) - 3))
        hub.actor.exchange(made_cache([*expected[start : start + 3], *rng.integers(0, 12, 9).tolist()]).to_bytes())
    found = made(exchange=hub)(BATCH)
    assert found["tokens"][0] == expected


def test_the_actor_saves_what_it_knows(tmp_path: Path) -> None:
    hub = FakeActor()
    assert hub.actor.figures() == {"exchanges": 0, "bytes": 0}
    generate = made(exchange=hub, exchange_every=1)
    without = generate(BATCH)
    file = hub.actor.save(tmp_path / "cache.npz")
    later = made(llm={"drafter_cache": file})(BATCH)
    assert later["acceptance_length"][0] > 1.5 * without["acceptance_length"][0]
    assert hub.actor.figures()["exchanges"] == 2


class Letters(Spelling):
    """A tokenizer without an end of text."""

    eos_token_id = None


def test_stop_strings_end_texts_as_in_generate() -> None:
    tokenizer = Letters(lambda token: chr(97 + token % 26))
    llm = LLM(ToyTarget(), tokenizer=tokenizer)
    text = llm.generate([1, 2, 3], max_new_tokens=12).text
    stop = text[4:6]
    found = Generate(ToyTarget(), llm={"tokenizer": tokenizer}, max_new_tokens=12, stop=stop)(
        {"prompt": objects([[1, 2, 3]])}
    )
    assert found["text"][0] == text[: text.index(stop)]
    assert found["finish_reason"][0] == "stop"
