"""`check` passes a right target, fails every broken one, and tells rounding from a bug."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from helpers import mostly_slow

from leapahead import LLM, BadParameter, ContextOverflow, LeapaheadError, Refused, SamplingParams, ties
from leapahead import drafters as registry
from leapahead.bench import prompts
from leapahead.bench.compare import compare
from leapahead.check import References, Report, check, distinct
from leapahead.core.sampling import GumbelNoise
from leapahead.core.stop import Stopper
from leapahead.core.tree import TokenTree
from leapahead.core.verify import Verdict
from leapahead.drafters.sources.corpus import write
from leapahead.drafters.sources.datastore import Header
from leapahead.models.base import CHAIN, NOTHING, Capture
from leapahead.models.choices import Choices
from leapahead.models.toy import ToySession, ToyTarget
from leapahead.models.transformers.model import TransformersTarget

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 4, 5], [0], [1, 2, 1, 2, 1], [8, 8]]
SAMPLED = SamplingParams(temperature=1.0, seed=7)
FILTERED = SamplingParams(temperature=0.7, top_k=4, top_p=0.8)


def checked(target: Any, sampling: SamplingParams = SamplingParams(), **options: Any) -> Report:  # noqa: B008
    options = {"max_new_tokens": 40, "batch": 3, **options}
    return check(target, None, options.pop("prompts", PROMPTS), sampling=sampling, **options)


# ------------------------------------------------------------------------------------------------ a right target


@pytest.mark.parametrize(
    ("sampling", "batch"),
    mostly_slow([(SamplingParams(), 1), (SAMPLED, 3), (FILTERED, 1)], (SAMPLED, 3), (FILTERED, 1)),
)
def test_a_right_target_passes(sampling: SamplingParams, batch: int) -> None:
    seen = []
    report = checked(ToyTarget(), sampling, batch=batch, progress=lambda *what: seen.append(what))
    assert report.ok
    assert (report.prompts, report.tokens) == (5, 200)
    assert [row.name for row in report.drafters] == registry.ready()
    for row in report.drafters:
        assert (row.tokens, row.differences) == (200, [])
        assert row.stats.committed == 200
    assert [done for _, done, _ in seen] == list(range(len(seen)))
    assert {total for *_, total in seen} == {len(seen)}


def test_eos_and_the_context_end_texts_alike() -> None:
    assert checked(ToyTarget(context_length=25), eos_token_ids=[4, 8]).ok


def test_the_report_as_json() -> None:
    found = checked(ToyTarget(), drafters=["lookahead"], options={"window": 4}).as_dict()
    assert (found["ok"], found["prompts"], found["tokens"]) == (True, 5, 200)
    (row,) = found["drafters"]
    assert (row["name"], row["mismatches"], row["ties"], row["largest_tie_gap"]) == ("lookahead", 0, 0, 0.0)
    assert row["acceptance_length"] > 1


def test_texts_of_plain_decoding_are_shared_by_checks() -> None:
    """A known text is not decoded again, so a wrong one is reported as a difference."""
    references: References = {}
    assert checked(ToyTarget(), drafters=["suffix"], references=references).ok
    assert len(references) == len(PROMPTS)
    first = next(iter(references))
    references[first] = [*references[first][:3], references[first][3] ^ 1, *references[first][4:]]
    report = checked(ToyTarget(), drafters=["jacobi"], references=references)
    assert [(each.prompt, each.position) for each in report.drafters[0].mismatches] == [(0, 3)]


def test_a_difference_in_the_last_token_of_a_full_context() -> None:
    references: References = {}
    target = ToyTarget(context_length=10)
    assert checked(target, drafters=["suffix"], references=references).ok
    first = next(iter(references))
    assert len(references[first]) == 10 - len(PROMPTS[0])
    references[first] = [*references[first][:-1], references[first][-1] ^ 1]
    report = checked(target, drafters=["jacobi"], references=references)
    assert [(each.prompt, each.position) for each in report.drafters[0].mismatches] == [(0, 6)]


def test_refusals_are_reported_unless_the_drafter_was_named() -> None:
    target = ToyTarget(capabilities=frozenset({CHAIN}))
    report = checked(target)
    assert report.ok
    refused = {row.name: row.refused for row in report.drafters if row.refused}
    assert set(refused) == {"lookahead", "recycling"}
    assert "needs tree from the target" in refused["lookahead"]
    assert {"name": "lookahead", "refused": refused["lookahead"]} in report.as_dict()["drafters"]
    with pytest.raises(Refused, match="needs tree"):
        checked(target, drafters=["lookahead"])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"drafters": ["lokahead"]}, "did you mean 'lookahead'"),
        ({"drafters": ["jacobi"], "options": {"window": 3}}, "none of these drafters has an option 'window'"),
        ({"options": {"window": 0}}, "window=0"),
        ({"batch": 0}, "batch=0"),
    ],
)
def test_bad_input(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(LeapaheadError, match=sentence):
        checked(ToyTarget(), **options)


def test_a_datastore_of_another_tokenizer(tokenizer: Any, tmp_path: Path) -> None:
    write(tmp_path / "store", Header.of("another", "0" * 16, 12, 4, 1), [[1, 2, 3, 4]])
    options: dict[str, Any] = {"drafters": ["datastore"], "options": {"file": str(tmp_path / "store")}}
    assert checked(ToyTarget(), **options).ok
    with pytest.raises(BadParameter, match="built with another tokenizer"):
        check(ToyTarget(), tokenizer, PROMPTS, **options)


def test_an_interrupted_check_keeps_the_finished_drafters() -> None:
    seen: list[list[str]] = []

    def progress(name: str, begun: int, total: int) -> None:
        if name == "jacobi":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checked(
            ToyTarget(),
            drafters=["plain", "prompt_lookup", "jacobi"],
            progress=progress,
            finished=lambda report: seen.append([row.name for row in report.drafters]),
        )
    assert seen == [[], ["plain"], ["plain", "prompt_lookup"]]


def test_no_prompts() -> None:
    with pytest.raises(BadParameter, match="no prompts"):
        check(ToyTarget(), None, [])


def test_a_prompt_that_is_not_possible_is_named_by_its_number() -> None:
    with pytest.raises(ContextOverflow, match=r"^prompt 1, numbered from 0: the prompt has 30 tokens and the context"):
        checked(ToyTarget(context_length=20), prompts=[[1], [1] * 30])
    with pytest.raises(BadParameter, match=r"^prompt 2, numbered from 0: the prompt is empty"):
        checked(ToyTarget(), prompts=[[1], [2], []])


# ------------------------------------------------------------------------------------------------ broken targets


class EverythingVisible(ToyTarget):
    """Every node sees the nodes before it, siblings too."""

    def mask(self, tree: TokenTree) -> Any:
        return np.tril(np.ones((len(tree), len(tree)), dtype=np.bool_))


class SiblingVisible(ToyTarget):
    """A node sees the sibling before it, where there is one."""

    def mask(self, tree: TokenTree) -> Any:
        mask, last = tree.ancestor_mask.copy(), dict[int, int]()
        for node, parent in enumerate(tree.parents.tolist()):
            mask[node, last.get(parent, node)] = True
            last[parent] = node
        return mask


class RootInvisible(ToyTarget):
    """Drafted nodes do not see the root."""

    def mask(self, tree: TokenTree) -> Any:
        mask = tree.ancestor_mask.copy()
        mask[1:, 0] = False
        return mask


class PositionsBySlot(ToyTarget):
    def positions(self, session: ToySession, tree: TokenTree) -> Any:
        return len(session.tokens) - 1 + np.arange(len(tree))


class WrongPath(ToySession):
    """Keeps the first nodes of the tree instead of the path's."""

    def commit(self, verdict: Verdict) -> None:
        super().commit(Verdict(tuple(range(len(verdict.path))), verdict.tokens, verdict.accepted))


class OffByOne(ToySession):
    """The last accepted node's entry is the one before it."""

    def commit(self, verdict: Verdict) -> None:
        path = verdict.path if len(verdict.path) == 1 else (*verdict.path[:-1], verdict.path[-2])
        super().commit(Verdict(path, verdict.tokens, verdict.accepted))


class BrokenCommit(ToyTarget):
    session: type[ToySession]

    def open(self, tokens: Any, params: SamplingParams, capture: Capture = NOTHING, *_: Any, **__: Any) -> ToySession:
        return self.session(self, [int(token) for token in tokens], params, capture)


class CommitsWrongPath(BrokenCommit):
    session = WrongPath


class CommitsOffByOne(BrokenCommit):
    session = OffByOne


class WrongBonus(ToyTarget):
    """The choices after a node are those of the node before."""

    def logits(self, session: ToySession, tree: TokenTree, num_computed: int = 0) -> Any:
        return np.roll(super().logits(session, tree, num_computed), len(tree) > 1, axis=0)


BROKEN = [
    EverythingVisible,
    SiblingVisible,
    RootInvisible,
    PositionsBySlot,
    CommitsWrongPath,
    CommitsOffByOne,
    WrongBonus,
]


BRANCHING, MATCHING = ["lookahead", "auto", "recycling"], ["ngram", "suffix"]


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize(
    ("sampling", "batch"), mostly_slow([(SamplingParams(), 3), (SAMPLED, 1)], (SamplingParams(), 3))
)
def test_a_broken_target_fails(
    broken: type[ToyTarget], sampling: SamplingParams, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leapahead.check.MOST_MISMATCHES", 2)  # to measure a mismatch takes a while
    options = {"nodes": 16}  # of those that would draft what pays
    report = checked(
        broken(),
        sampling,
        batch=batch,
        prompts=PROMPTS[:2],
        max_new_tokens=24,
        drafters=["plain", *BRANCHING, *MATCHING],
        options=options,
    )
    assert not report.ok
    assert report.as_dict()["ok"] is False
    rows = {row.name: row for row in report.drafters}
    # A greedy text that loops is matched by one long chain, right to its end, which harms nobody.
    notice = [*BRANCHING, *(MATCHING if sampling.temperature else [])]
    assert [name for name in notice if not rows[name].mismatches] == []
    assert not rows["plain"].differences
    assert not any(row.ties for row in report.drafters)  # broken ways of computing are no excuse


def test_noise_that_is_not_keyed_by_position_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    state = np.random.default_rng(0)
    monkeypatch.setattr(GumbelNoise, "words", lambda self, position: state.integers(2**32, size=12))
    assert not checked(ToyTarget(), SAMPLED, prompts=PROMPTS[:1], max_new_tokens=8).ok


def test_a_text_that_ends_too_early_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Stopper.cut

    def cut(self: Stopper, verdict: Verdict) -> Verdict:
        found = original(self, verdict)
        if len(verdict.tokens) > 2:
            self.finish_reason = "length"
        return found

    monkeypatch.setattr(Stopper, "cut", cut)
    report = checked(ToyTarget())
    assert any(d.got is None for row in report.drafters for d in row.mismatches)
    assert report.as_dict()["drafters"]  # an infinite gap is still JSON
    assert "Infinity" not in str(report.as_dict())


# ---------------------------------------------------------------------------------------------------------- ties


class Rounding(ToyTarget):
    """A target whose logits depend on the number of nodes, as much as `size`, of which two are that close."""

    def __init__(self, size: float, gap: float) -> None:
        super().__init__(order=1, sharpness=3.0)
        self.size, self.gap = size, gap
        self.info = replace(self.info, precision=float(np.finfo(np.float32).eps))

    def row(self, seen: Any) -> Any:
        row = super().row(seen).copy()
        first, second = np.argsort(-row)[:2]
        row[second] = row[first] - self.gap
        return row

    def logits(self, session: ToySession, tree: TokenTree, num_computed: int = 0) -> Any:
        logits = super().logits(session, tree, num_computed).astype(np.float32)
        rng = np.random.default_rng([len(tree), len(session.tokens)])
        wobble = rng.uniform(-self.size, self.size, size=logits.shape) * (len(tree) > 1)
        return (logits + wobble).astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=1e-05, seed=1)])
def test_rounding_is_a_tie(sampling: SamplingParams) -> None:
    report = checked(Rounding(2e-5, 1e-6), sampling, prompts=PROMPTS[:2], max_new_tokens=20)
    found = [tie for row in report.drafters for tie in row.ties]
    assert report.ok
    assert found
    assert all(abs(tie.gap) <= tie.noise for tie in found)
    scale = sampling.temperature or 1.0
    assert max(row.largest_tie for row in report.drafters) * scale < 1e-4
    assert all(row.tokens >= 36 for row in report.drafters)  # it went on behind every tie


@pytest.mark.slow
def test_more_than_rounding_is_a_mismatch() -> None:
    assert not checked(Rounding(0.5, 0.1), prompts=PROMPTS[:1]).ok


def test_a_gap_beyond_the_noise_is_a_mismatch() -> None:
    found = ties.measure(Rounding(1e-6, 1e-3), [1, 2, 3, 1], [4], (0, 1), SamplingParams(), 2)
    assert not found.tie
    assert abs(found.gap) > found.noise > 0


def test_a_token_that_was_filtered_out_has_an_infinite_gap() -> None:
    target = ToyTarget()
    row = target.row(tuple(enumerate([1, 2, 3])))
    best, worst = int(np.argmax(row)), int(np.argmin(row))
    found = ties.measure(target, [1, 2, 3], [], (best, worst), SamplingParams(temperature=1.0, top_k=2), 1)
    assert found == ties.Gap(math.inf, 0.0, False)


def test_entries_of_accepted_tokens_that_lie_apart_are_one_of_the_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    paths, commit = list[tuple[int, ...]](), ToySession.commit

    def noted(self: ToySession, verdict: Verdict) -> None:
        paths.append(tuple(verdict.path))
        commit(self, verdict)

    monkeypatch.setattr(ToySession, "commit", noted)
    text = [1, 2, 3, 1, 5, 4, 2]
    found = ties.measure(ToyTarget(), text, [], (0, 1), SamplingParams(), 1)
    assert found.noise < 1e-9
    assert any(len(path) > 1 and path[-1] > len(path) for path in paths)


def test_a_batch_is_measured_with_as_many_copies_as_the_cache_has_room_for(tiny_model: Any) -> None:
    target = TransformersTarget(tiny_model, cache_tokens=600)
    found = ties.measure(target, list(range(5, 45)), [], (6, 7), SamplingParams(), batch=20)
    assert found.noise > 0
    assert not any(row.busy for row in target.executor.cache.rows)  # type: ignore[union-attr]


def test_every_way_of_computing_is_equal_on_a_right_target() -> None:
    class Counting(ToyTarget):
        shapes: ClassVar[set[tuple[int, ...]]] = set()

        def step(self, sessions: Any, trees: Any, *rest: Any, **more: Any) -> list[Choices]:
            self.shapes.add(tuple(len(tree) for tree in trees))
            return super().step(sessions, trees, *rest, **more)

    target = Counting(order=3)
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0]
    assert ties.measure(target, tokens, [], (0, 1), SamplingParams(), 3).noise == 0.0
    assert len(target.shapes) > 10
    assert (1, 1, 1) in target.shapes


def test_distinct() -> None:
    assert distinct([[1, 2, 3, 4, 5]]) == 1.0
    assert distinct([[1] * 13]) == 0.1
    assert distinct([[1, 2]]) == 1.0


# -------------------------------------------------------------------------------------------------- Transformers


@pytest.fixture
def llm(tiny_folder: Path) -> LLM:
    return LLM(str(tiny_folder))


def checked_model(llm: LLM, sampling: SamplingParams, drafters: list[str] | None = None) -> Report:
    texts = prompts.BUNDLED[:2]
    return check(llm.target, llm.tokenizer, texts, drafters, max_new_tokens=32, sampling=sampling, batch=2)


@pytest.mark.parametrize("sampling", mostly_slow([SamplingParams(), SAMPLED], SAMPLED))
def test_a_model_passes(llm: LLM, sampling: SamplingParams) -> None:
    report = checked_model(llm, sampling)
    assert report.ok
    assert not any(row.differences for row in report.drafters)


@pytest.mark.slow
def test_a_model_in_bfloat16_has_ties_at_most(tiny_folder: Path) -> None:
    assert checked_model(LLM(str(tiny_folder), dtype="bfloat16"), SamplingParams()).ok


def broken_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    def everything(tree: TokenTree) -> Any:
        return np.tril(np.ones((len(tree), len(tree)), dtype=np.bool_))

    monkeypatch.setattr(TokenTree, "ancestor_mask", property(everything))


def broken_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    from leapahead.models.transformers.masks import Inputs

    original = Inputs.of

    def of(trees: Any, *args: Any) -> Any:
        inputs = original(trees, *args)
        inputs.positions.copy_(
            inputs.positions[:, :1] + inputs.positions.new_ones(inputs.positions.shape).cumsum(1) - 1
        )
        return inputs

    monkeypatch.setattr(Inputs, "of", of)


def broken_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    from leapahead.models.transformers.kv_cache import KVCache

    original = KVCache.keep
    monkeypatch.setattr(KVCache, "keep", lambda self, row, path: original(self, row, range(len(path))))


@pytest.mark.slow
@pytest.mark.parametrize("damage", [broken_mask, broken_positions, broken_commit])
@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=0.1, seed=7)])
def test_a_broken_model_fails(llm: LLM, damage: Any, sampling: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> None:
    damage(monkeypatch)  # after the load, which would refuse it
    assert not checked_model(llm, sampling, ["lookahead"]).ok


# ------------------------------------------------------------------------------------------------------- compare


def test_compare() -> None:
    llm = LLM(ToyTarget())
    seen: list[tuple[int, int]] = []
    drafted = llm.generate([1, 2, 3], max_new_tokens=30, temperature=1.0)
    found = compare(
        llm, [1, 2, 3], drafted, max_new_tokens=30, temperature=1.0, progress=lambda *what: seen.append(what)
    )
    assert found.equal
    assert found.first_difference is None
    assert found.plain.seed == drafted.seed
    assert len(found.ratios) == 5
    assert min(found.ratios) <= found.ratio <= max(found.ratios)
    assert seen == [(done, 11) for done in range(11)]
    assert found.as_dict()["rounds"] == 5


def test_compare_sees_a_difference() -> None:
    llm = LLM(CommitsWrongPath(), nodes=16)
    drafted = llm.generate([1, 2, 3], max_new_tokens=60)
    found = compare(llm, [1, 2, 3], drafted, rounds=1, max_new_tokens=60)
    assert not found.equal
    assert drafted.tokens[found.first_difference] != found.plain.tokens[found.first_difference]  # type: ignore[index]


# ------------------------------------------------------------------------------------------------------- prompts


def test_bundled_prompts() -> None:
    assert 8 <= len(prompts.BUNDLED) <= 16
    assert len(set(prompts.BUNDLED)) == len(prompts.BUNDLED)
