"""Draft models: they follow the text, draft what pays, change nothing; speculative sampling is as likely as plain."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from helpers import GREEDY, assert_same_text, begin, run
from scipy.stats import chi2

from leapahead import LLM
from leapahead.api import encode
from leapahead.cli import main
from leapahead.core.errors import BadParameter, LeapaheadError, Refused
from leapahead.core.sampling import SamplingParams
from leapahead.core.stop import StopParams
from leapahead.core.tree import TokenTree
from leapahead.drafters import draft_models
from leapahead.drafters import speculative_sampling as speculative_room
from leapahead.drafters.auto import Auto
from leapahead.drafters.base import Drafter
from leapahead.drafters.single import DraftModel
from leapahead.drafters.speculative_sampling import SpeculativeSampling
from leapahead.engine.loop import decode
from leapahead.models import loading
from leapahead.models.base import CHAIN, TOP_K, Choices, Target
from leapahead.models.loading import Loaded
from leapahead.models.toy import ToyTarget
from leapahead.planner import profile as machine_room
from leapahead.planner.acceptance import Calibration
from leapahead.planner.latency import CostCurve
from leapahead.planner.profile import Machine, machine_of

FLAT = CostCurve({1: 1.0, 8: 1.02, 128: 1.2})
DRAFT = CostCurve({1: 0.05, 8: 0.06, 128: 0.2})
DEAR = CostCurve({1: 0.98, 8: 1.5, 128: 9.0})
AGAIN = Machine.again
WARM = SamplingParams(temperature=1.0, seed=3)


class Counting(ToyTarget):
    """Counts what it computes, and its open sessions."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.rows = self.forwards = 0
        self.sessions: list[Any] = []

    def open(self, *args: Any, **options: Any) -> Any:
        self.sessions.append(super().open(*args, **options))
        return self.sessions[-1]

    def step(self, sessions: Any, trees: Any, known: Sequence[int] | None = None) -> list[Choices]:
        self.forwards += 1
        self.rows += sum(len(tree) - first for tree, first in zip(trees, known or [0] * len(trees), strict=True))
        return super().step(sessions, trees, known)

    @property
    def closed(self) -> bool:
        return all(session.cache == [] for session in self.sessions)


class Blurred(ToyTarget):
    """The same table as a plain one, and some of another: a draft that is often right."""

    def __init__(self, share: float = 0.4, **options: Any) -> None:
        super().__init__(**options)
        self.share, self.other = share, ToyTarget(**{**options, "seed": 99})

    def row(self, seen: Any) -> Any:
        return (1 - self.share) * super().row(seen) + self.share * self.other.row(seen)


@pytest.fixture(autouse=True)
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Curves stay as they are put, whatever steps take here."""
    monkeypatch.setattr(Machine, "observed", lambda self, forward: None)
    monkeypatch.setattr(Machine, "drafting", lambda self, nodes: 0.0)
    monkeypatch.setattr(Machine, "again", lambda self, target: None)


def priced(target: Target, draft: Target, curve: CostCurve = DRAFT, own: CostCurve = FLAT) -> None:
    machine_of(target).put(target, 1, own)
    machine_of(draft).put(draft, 1, curve)


# ------------------------------------------------------------------------------------------------------ following


def test_a_perfect_draft_is_accepted_whole_and_computes_each_token_once() -> None:
    draft = Counting()
    done = run(ToyTarget(), DraftModel(draft, nodes=4, depth=4, chain=True), stop=StopParams(max_new_tokens=60))
    assert [len(step.tokens) for step in done.steps] == [5] * 12
    # Every committed token goes through the draft once, and nothing else does; the last few are never needed.
    assert draft.rows <= 60
    assert draft.forwards == 4 * 12
    assert draft.closed


@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(
    "options",
    [
        {"nodes": 3, "depth": 3, "chain": True},
        {"nodes": 12, "depth": 3},
        {"nodes": 12, "depth": 2, "seed_aware": False},
        {"nodes": 7},
        {},
    ],
    ids=str,
)
def test_the_text_is_that_of_plain_decoding(params: SamplingParams, share: float, options: dict[str, Any]) -> None:
    target, draft = ToyTarget(), Blurred(share)
    priced(target, draft)
    assert_same_text(target, DraftModel(draft, **options), params=params, stop=StopParams(max_new_tokens=50))


def test_only_what_is_new_goes_through_the_draft() -> None:
    """A tree that grows level by level is never computed again, whatever becomes of it."""
    draft, target = Counting(seed=5), ToyTarget()
    priced(target, draft)
    done = run(target, DraftModel(draft, nodes=9, depth=3), stop=StopParams(max_new_tokens=40))
    steps = len(done.steps)
    assert draft.forwards <= 3 * steps
    assert draft.rows <= steps * (1 + 9 + 9) + 40


def test_sequences_of_a_batch_share_each_forward_of_the_draft() -> None:
    draft, target = Counting(), ToyTarget()
    prompts = [(1, 2, 3), (4, 5), (6, 7, 8, 9)]
    alone = [run(target, None, prompt).tokens for prompt in prompts]
    together = [begin(target, DraftModel(draft, nodes=3, depth=3, chain=True), prompt) for prompt in prompts]
    texts: dict[Any, list[int]] = {generation: [] for generation in together}
    steps = 0
    for generation, step in decode(target, list(together)):
        texts[generation] += step.tokens
        steps += 1
    assert [texts[generation] for generation in together] == alone
    assert draft.forwards <= steps / 3 * 3 + 3, "a look is one forward for all"
    assert draft.closed


def test_an_interrupted_text_gives_the_drafts_cache_back() -> None:
    draft, target = Counting(), ToyTarget()
    steps = decode(target, [begin(target, DraftModel(draft, nodes=3, depth=3))])
    next(steps)
    assert not draft.closed
    steps.close()
    assert draft.closed


def test_a_draft_with_a_short_context_stops_and_says_so() -> None:
    draft = Counting(context_length=16)
    done = assert_same_text(
        ToyTarget(), DraftModel(draft, nodes=3, depth=3, chain=True), stop=StopParams(max_new_tokens=40)
    )
    assert "context" in done.generation.stats.drafter["draft"]["stopped"]
    assert done.generation.stats.accepted > 0
    assert draft.closed


@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("sizes", [(12, 9), (9, 12)], ids=["smaller", "larger"])
def test_one_vocabulary_may_be_the_beginning_of_the_other(params: SamplingParams, sizes: tuple[int, int]) -> None:
    target, draft = ToyTarget(vocab_size=sizes[0]), Counting(vocab_size=sizes[1])
    done = assert_same_text(target, DraftModel(draft, nodes=6, depth=2), params=params)
    stopped = done.generation.stats.drafter["draft"].get("stopped", "")
    assert not stopped or ("outside the vocabulary of 9" in stopped and max(done.tokens) >= 9)
    assert done.generation.stats.accepted > 0


def test_a_draft_that_fails_leaves_the_text_alone() -> None:
    class Failing(Counting):
        def step(self, sessions: Any, trees: Any, known: Sequence[int] | None = None) -> list[Choices]:
            if self.forwards > 5:
                raise LeapaheadError("out of memory")
            return super().step(sessions, trees, known)

    done = assert_same_text(ToyTarget(), DraftModel(Failing(), nodes=3, depth=3, chain=True))
    assert done.generation.stats.drafter["draft"]["stopped"] == "out of memory"


# ------------------------------------------------------------------------------------------------------- planning


def test_a_cheap_draft_that_is_right_is_looked_at_often_and_a_dear_one_never() -> None:
    for curve, length in ((DRAFT, 5.0), (DEAR, 0.0)):
        target, draft = ToyTarget(seed=4), Counting(seed=4)
        priced(target, draft, curve)
        done = run(target, DraftModel(draft), stop=StopParams(max_new_tokens=80))
        stats = done.generation.stats
        if length:
            assert stats.acceptance_length > length
        else:
            assert stats.acceptance_length == 1.0
            assert draft.forwards <= 2, "now and then it is asked whether that is still so"


def test_a_draft_that_is_never_right_is_soon_left_alone() -> None:
    target, draft = ToyTarget(vocab_size=50), Counting(vocab_size=50, seed=31)
    priced(target, draft, CostCurve({1: 0.3, 8: 0.35}))
    done = run(target, DraftModel(draft), stop=StopParams(max_new_tokens=300))
    assert draft.forwards < 0.2 * len(done.steps)


def test_how_far_it_looks_depends_on_how_often_it_is_right() -> None:
    lengths = []
    for share in (0.6, 0.1):
        target, draft = ToyTarget(seed=4), Blurred(share, seed=4)
        priced(target, draft, CostCurve({1: 0.15, 8: 0.2}))
        done = run(target, DraftModel(draft), params=WARM, stop=StopParams(max_new_tokens=200))
        lengths.append(done.generation.stats.drafter["draft"]["forwards"] / len(done.steps))
    assert lengths[0] < lengths[1]


def test_the_dice_make_a_sampled_draft_better() -> None:
    def length(*, seed_aware: bool) -> float:
        target, draft = ToyTarget(vocab_size=40), Blurred(0.25, vocab_size=40)
        drafter = DraftModel(draft, nodes=4, depth=4, chain=True, seed_aware=dice)
        done = run(target, drafter, params=WARM, stop=StopParams(max_new_tokens=400))
        return done.generation.stats.acceptance_length

    assert length(seed_aware=True) > 1.2 * length(seed_aware=False)


def test_several_drafts_make_one_tree() -> None:
    target = ToyTarget()
    drafts = [Blurred(0.5), Blurred(0.5, seed=0, order=2)]
    drafts[1].other = ToyTarget(seed=7)
    done = assert_same_text(target, DraftModel(drafts, nodes=12, depth=4), stop=StopParams(max_new_tokens=60))
    assert set(done.generation.stats.drafted_by) == {"draft", "draft2"}
    assert done.generation.stats.drafter["draft2"]["forwards"] > 0


def test_auto_takes_a_draft_model_among_its_sources() -> None:
    target, draft = ToyTarget(vocab_size=60), Blurred(0.2, vocab_size=60)
    priced(target, draft)
    done = assert_same_text(target, Auto(draft=draft), params=WARM, stop=StopParams(max_new_tokens=120))
    assert done.generation.stats.accepted_by["draft"] > 20
    assert done.generation.stats.drafted_by["recycling"] + done.generation.stats.drafted_by["suffix"] > 0


# ------------------------------------------------------------------------------------------------------ bad input


class NoChains(ToyTarget):
    def __init__(self) -> None:
        super().__init__(capabilities=frozenset({TOP_K}))


def test_what_cannot_draft_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"toy.* cannot draft, since it does not have chain"):
        DraftModel(NoChains())
    for kind in (DraftModel, SpeculativeSampling):
        with pytest.raises(BadParameter, match=r"needs draft=\.\.\., the smaller model"):
            kind()
    with pytest.raises(BadParameter, match="there is no folder"):
        DraftModel(str(tmp_path / "none"))
    with pytest.raises(BadParameter, match="draft names no model"):
        DraftModel(" , ")
    with pytest.raises(BadParameter, match="rule='x' is not possible; there are specinfer, sequoia, spectr"):
        SpeculativeSampling(ToyTarget(), rule="x")
    with pytest.raises(BadParameter, match="width=0"):
        SpeculativeSampling(ToyTarget(), width=0)
    with pytest.raises(BadParameter, match="takes one draft model"):
        SpeculativeSampling([ToyTarget(), ToyTarget()])


def test_a_draft_that_does_not_fit_beside_the_target_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "big.gguf"
    file.write_bytes(b"x" * 5000)
    monkeypatch.setattr(draft_models, "memory_left", lambda: 4000)
    with pytest.raises(BadParameter, match=r"does not fit beside the target: its weights are .* GiB"):
        DraftModel(str(file))


def test_another_tokenizer_is_refused_by_the_first_difference(tokenizer: Any) -> None:
    bundled = draft_models.load("bundled")
    with pytest.raises(BadParameter, match="another vocabulary than the target: "):
        DraftModel(bundled).check_tokenizer(tokenizer)
    with pytest.raises(BadParameter, match="another vocabulary"):
        Auto(draft=Loaded(ToyTarget(), tokenizer, ())).check_tokenizer(bundled.tokenizer)  # type: ignore[arg-type]
    assert bundled.tokenizer is not None
    DraftModel(bundled).check_tokenizer(bundled.tokenizer)


@pytest.mark.parametrize(("others", "looks"), [(0.25, True), (0.01, False)])
def test_a_look_is_worth_what_its_first_few_choices_bring(others: float, looks: bool) -> None:
    """A third of a step, for a first choice that is right three times in ten: the next three pay, or they do not."""
    target, draft = ToyTarget(), Counting()
    priced(target, draft, CostCurve({1: 0.35, 8: 0.4}))
    machine_of(target).calibration = Calibration(
        {
            ("draft, first choice", "greedy"): 0.3,
            ("draft", "greedy", 0): 0.3,
            **{("draft", "greedy", rank): others for rank in (1, 2, 3)},
        }
    )
    run(target, DraftModel(draft), stop=StopParams(max_new_tokens=4))
    assert (draft.forwards > 0) == looks


@pytest.mark.parametrize("now", [0.05, 2.0], ids=["faster", "slower"])
def test_a_draft_that_seems_slow_is_measured_beside_its_target(now: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was kept may be of a busy hour; both are measured anew, once, before the draft is left alone."""
    monkeypatch.setattr(Machine, "again", AGAIN)
    target, draft, measured = ToyTarget(), ToyTarget(), list[Target]()

    def measure(each: Target) -> CostCurve:
        measured.append(each)
        return FLAT if each is target else CostCurve({1: now, 8: 1.2 * now})

    monkeypatch.setattr(machine_room, "_measured", measure)
    priced(target, draft, CostCurve({1: 50.0, 8: 60.0}))
    if now < 1:
        assert run(target, DraftModel(draft)).generation.stats.drafted > 0
    else:
        with pytest.warns(UserWarning, match=r"takes 2000\.0 ms a token and the target toy.* 1000\.0 ms"):
            run(target, DraftModel(draft))
        with pytest.warns(UserWarning, match="cannot make it faster"):
            assert run(target, DraftModel(draft)).generation.stats.drafted == 0
    assert measured == [draft, target]


def test_a_slower_draft_is_said_with_both_costs_and_not_used() -> None:
    target, draft = ToyTarget(), Counting()
    priced(target, draft, CostCurve({1: 2.0, 8: 2.5}))
    with pytest.warns(UserWarning, match=r"takes 2000.0 ms a token and the target toy.* 1000.0 ms"):
        done = run(target, Auto(draft=draft))
    assert draft.forwards == 0
    assert "2000.0 ms" in done.generation.stats.drafter["draft"]["stopped"]


# ----------------------------------------------------------------------------------------------- the library's doors


def test_llm_takes_a_draft_for_all_its_drafters(tmp_path: Path) -> None:
    llm = LLM(dtype="float32", drafter="draft_model", draft="bundled", nodes=6, depth=3)
    plain = LLM(dtype="float32", drafter="plain").generate("def add(a, b):", max_new_tokens=24)
    result = llm.generate("def add(a, b):", max_new_tokens=24)
    assert result.text == plain.text
    assert result.stats.accepted_by["draft"] > 0
    given = {"depth": 2, "width": 2}
    other = llm.generate("def add(a, b):", max_new_tokens=24, drafter="speculative_sampling", drafter_options=given)
    assert other.text == plain.text  # greedy the rules agree
    assert llm.generate("def add(a, b):", max_new_tokens=8, drafter="plain").tokens == plain.tokens[:8]
    with pytest.raises(BadParameter, match="no option 'draft'"):
        LLM(drafter="suffix", draft="bundled")


def test_the_command_line_takes_a_draft() -> None:
    runner = CliRunner()
    options = ["--draft", "bundled", "-o", "nodes=6", "-o", "depth=3", "--dtype", "float32"]
    found = runner.invoke(main, ["generate", "def add(a, b):", "-d", "draft_model", *options, "--max-new-tokens", "20"])
    assert found.exit_code == 0, found.output
    checked = runner.invoke(main, ["check", "-d", "draft_model", *options, "--limit", "2", "--max-new-tokens", "20"])
    assert checked.exit_code == 0, checked.output
    assert "token for token" in checked.output


# -------------------------------------------------------------------------------------------- speculative sampling


def distribution(target: ToyTarget, params: SamplingParams, prompt: Sequence[int], length: int) -> dict[Any, float]:
    """Of plain sampling, exactly: text -> probability."""
    found = {(): 1.0}
    for _ in range(length):
        longer = {}
        for text, p in found.items():
            scores = target.row(tuple(enumerate((*prompt, *text)))) / params.temperature
            weights = np.exp(scores - scores.max())
            order = np.argsort(-weights)
            kept = order[: params.top_k or len(order)]
            mask = np.zeros_like(weights)
            mask[kept] = weights[kept]
            mask /= mask.sum()
            longer |= {(*text, token): p * mask[token] for token in range(target.vocab_size) if mask[token] > 0}
        found = longer
    return found


def deviation(kind: type[Drafter], count: int = 2500, params: dict[str, Any] | None = None, **options: Any) -> float:
    """Chi-square over all texts of three tokens, as a multiple of what is exceeded once in a million."""
    given = {"temperature": 1.0, **(params or {})}
    target, draft = ToyTarget(vocab_size=4, sharpness=1.2), ToyTarget(vocab_size=4, sharpness=1.2, seed=6)
    expected = distribution(target, SamplingParams(**given), (1, 2), 3)
    found: Counter[tuple[int, ...]] = Counter()
    for seed in range(count):
        done = run(
            target,
            kind(draft, **options),  # type: ignore[call-arg]
            (1, 2),
            params=SamplingParams(**given, seed=seed),
            stop=StopParams(max_new_tokens=3),
        )
        found[tuple(done.tokens)] += 1
    return excess(found, expected)


def excess(found: Counter[tuple[int, ...]], expected: dict[Any, float]) -> float:
    """Chi-square of texts, as a multiple of what is exceeded once in a million."""
    count = sum(found.values())
    assert set(found) <= set(expected)
    frequent = {text for text, p in expected.items() if p * count >= 5}
    rest = 1 - sum(expected[text] for text in frequent)
    parts = [(found[text], expected[text] * count) for text in frequent]
    parts += [(sum(n for text, n in found.items() if text not in frequent), rest * count)] if rest * count >= 5 else []
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in parts)
    return float(statistic / chi2.isf(1e-6, len(parts) - 1))


@pytest.mark.parametrize(
    "options",
    [
        {"width": 1, "depth": 2},
        {"rule": "sequoia", "width": 3, "depth": 2},
        {"rule": "specinfer", "width": 2, "depth": 2},
        {"rule": "spectr", "width": 2, "depth": 2},
        {"rule": "sequoia", "width": 2, "depth": 3, "nodes": 5, "unsure": 0.5},
    ],
    ids=str,
)
def test_speculative_sampling_is_exact_in_distribution(options: dict[str, Any]) -> None:
    """Three tokens of four: 64 texts. One false alarm in a million."""
    assert deviation(SpeculativeSampling, **options) < 1


@pytest.mark.parametrize("rule", ["leviathan", "sequoia", "specinfer", "spectr"])
def test_the_bundled_models_are_exact_in_distribution(rule: str) -> None:
    """Texts of three tokens out of the three likeliest each; what they should be, the target says without any draft."""
    loaded, draft = (loading.load(loading.bundled(name), dtype="float32") for name in ("tiny", "tiny-draft"))
    target, filters = loaded.target, {"temperature": 1.2, "top_k": 3}
    prompt = encode("def add(a, b):\n    return", loaded.tokenizer, target)
    options = {"rule": "sequoia", "width": 1} if rule == "leviathan" else {"rule": rule, "width": 3}
    expected: dict[Any, float] = {(): 1.0}
    for _ in range(3):
        longer = {}
        for text, p in expected.items():
            session = target.open([*prompt, *text], SamplingParams(**filters))
            (after,) = target.step([session], [TokenTree.root(session.tokens[-1])])[0].probabilities([0])
            longer |= {(*text, int(token)): p * after[token] for token in np.flatnonzero(after)}
            session.close()
        expected = longer
    assert len(expected) == 27
    found: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    for first in range(0, 600, 50):
        batch = [
            begin(
                target,
                SpeculativeSampling(draft.target, depth=2, **options),
                prompt,
                params=SamplingParams(**filters, seed=seed),
                stop=StopParams(max_new_tokens=3),
            )
            for seed in range(first, first + 50)
        ]
        texts = list(batch)
        for _ in decode(target, batch):
            pass
        found.update(tuple(each.session.tokens[len(prompt) :]) for each in texts)
        accepted += sum(each.stats.accepted for each in texts)
    assert accepted > 100  # else it would be a test of plain sampling
    assert excess(found, expected) < 1
    turned = dict(zip(expected, reversed(expected.values()), strict=True))
    assert excess(found, turned) > 1  # it can fail


def test_filters_apply_to_the_draft_as_to_the_target() -> None:
    filters = {"temperature": 0.7, "top_k": 2}
    assert deviation(SpeculativeSampling, params=filters, width=2, depth=2) < 1


def test_mutations_of_speculative_sampling_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = speculative_room._Growing.draw
    with monkeypatch.context() as patch:  # a q that is not the one that was drawn from

        def flattened(self: Any, paths: Any, q: Any) -> None:
            right(self, paths, q)
            self.qs = {node: [np.full(4, 0.25)] * len(some) for node, some in self.qs.items()}

        patch.setattr(speculative_room._Growing, "draw", flattened)
        assert deviation(SpeculativeSampling, width=2, depth=2) > 1
    with monkeypatch.context() as patch:  # noise shared by the draws and the tests

        def again(self: Any, context: Any) -> None:
            SpeculativeSampling.begin(self, context)

        class Shared(SpeculativeSampling):
            def begin(self, context: Any) -> None:
                super().begin(context)
                seed = context.params.seed
                new = lambda: np.random.Generator(np.random.Philox(key=np.array([seed, 5], dtype=np.uint64)))  # noqa: E731
                self._rng = new()

            @classmethod
            def propose_together(cls, target: Any, asks: Any) -> Any:
                found = super().propose_together(target, asks)
                for ask in asks:
                    ask.drafter._rng.bit_generator.state = type(ask.drafter._rng.bit_generator)(
                        key=np.array([ask.context.params.seed, 5], dtype=np.uint64)
                    ).state
                return found

        assert deviation(Shared, width=1, depth=2) > 1
    with monkeypatch.context() as patch:  # p without the filters
        patch.setattr(
            Choices,
            "probabilities",
            lambda self, nodes: (
                np.exp((rows := np.asarray(self._rows)[np.asarray(nodes) - self.first]) - rows.max(1, keepdims=True))
                / np.exp(rows - rows.max(1, keepdims=True)).sum(1, keepdims=True)
            ),
        )
        with pytest.raises(AssertionError):
            assert deviation(SpeculativeSampling, params={"top_k": 2}, width=2, depth=2) < 1


def test_a_seed_gives_the_same_sample_again_and_greedy_the_plain_text() -> None:
    draft = ToyTarget(seed=6)
    for rule, width in product(("sequoia", "specinfer", "spectr"), (1, 3)):
        one, two = (run(ToyTarget(), SpeculativeSampling(draft, rule=rule, width=width), params=WARM) for _ in "ab")
        assert one.tokens == two.tokens
        assert_same_text(ToyTarget(), SpeculativeSampling(draft, rule=rule, width=width))


def test_speculative_sampling_serves_a_batch_and_says_that_it_is_another_text() -> None:
    assert not SpeculativeSampling.same_text
    assert DraftModel.same_text
    target, draft = ToyTarget(), Counting(seed=2)
    together = [begin(target, SpeculativeSampling(draft, width=2, depth=3), prompt, WARM) for prompt in ((1,), (2, 3))]
    for _ in decode(target, list(together)):
        pass
    assert all(generation.finished for generation in together)
    assert draft.closed


def test_check_refuses_a_rule_that_changes_the_text() -> None:
    runner = CliRunner()
    options = ["--draft", "bundled", "--dtype", "float32", "--limit", "1", "--max-new-tokens", "8"]
    found = runner.invoke(main, ["check", "-d", "speculative_sampling", *options, "-t", "1"])
    assert "exact in distribution, not in text" in found.output
    assert runner.invoke(main, ["check", "-d", "speculative_sampling", *options]).exit_code == 0


def test_gguf_drafts_for_gguf_and_for_transformers() -> None:
    from gguf_models import bundled

    text = loading.load(None, dtype="float32")
    small = str(bundled("q8_0"))
    llm = LLM(str(bundled("f32")), drafter="draft_model", draft=small, nodes=6, depth=3, n_ctx=256, n_threads=1)
    plain = LLM(str(bundled("f32")), drafter="plain", n_ctx=256, n_threads=1)
    for options in ({}, {"temperature": 1.0, "seed": 5}):
        expected = plain.generate("def add(a, b):", max_new_tokens=24, **options)  # type: ignore[arg-type]
        found = llm.generate("def add(a, b):", max_new_tokens=24, **options)  # type: ignore[arg-type]
        assert found.tokens == expected.tokens
        assert found.stats.acceptance_length > 2
    mixed = LLM(text.target, tokenizer=text.tokenizer, drafter="draft_model", draft=small, nodes=6, depth=3)
    assert mixed.generate("def add(a, b):", max_new_tokens=16).stats.accepted > 4


# ------------------------------------------------------------------------------------------------ the target itself


@pytest.fixture(scope="module")
def own() -> LLM:
    return LLM(dtype="float32", drafter="plain")


@pytest.mark.parametrize("draft", ["self:skip=2-3", "self:skip=1m,4a", "self:first=3"])
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 2}], ids=["greedy", "sampled"])
def test_the_target_drafts_for_itself_with_layers_left_out(own: LLM, draft: str, options: dict[str, Any]) -> None:
    llm = LLM(own.target, tokenizer=own.tokenizer, drafter="draft_model", draft=draft, nodes=6, depth=3)
    expected = own.generate("def add(a, b):", max_new_tokens=24, **options)  # type: ignore[arg-type]
    found = llm.generate("def add(a, b):", max_new_tokens=24, **options)  # type: ignore[arg-type]
    assert found.tokens == expected.tokens
    assert found.stats.accepted > 2
    assert own.generate("def add(a, b):", max_new_tokens=24, **options).tokens == expected.tokens  # type: ignore[arg-type]


def test_what_a_search_has_found_is_used_and_where_there_was_none_it_is_said(
    own: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEAPAHEAD_CACHE", str(tmp_path))
    options: dict[str, Any] = {"tokenizer": own.tokenizer, "drafter": "draft_model", "draft": "self:skip"}
    with pytest.raises(BadParameter, match="run `leapahead lab skip`"):
        LLM(loading.load(own.target.model).target, **options)  # type: ignore[attr-defined]
    searched = ["lab", "skip", "--limit", "1", "--trials", "4", "--max-new-tokens", "8", "--dtype", "float32"]
    found = CliRunner().invoke(main, searched)
    assert found.exit_code == 0, found.output
    assert "layer can be left out" in found.output or "use it with --draft self:skip" in found.output
    file = next((tmp_path / "skip").iterdir())
    text = file.read_text(encoding="utf-8")
    file.write_text(re.sub(r'"skip": "[^"]*"', '"skip": "2-3"', text), encoding="utf-8")
    again = LLM(dtype="float32", drafter="draft_model", draft="self:skip", nodes=4, depth=2)
    assert again.generate("def add(a, b):", max_new_tokens=12).stats.accepted > 0
    file.write_text(re.sub(r'"skip": "[^"]*"', '"skip": ""', text), encoding="utf-8")
    with pytest.raises(BadParameter, match="does not pay"):
        LLM(dtype="float32", drafter="draft_model", draft="self:skip")


@pytest.mark.parametrize(
    ("draft", "why"),
    [
        ("self:skip=99", "99"),
        ("self:first=0", "layers=0 is not possible"),
        ("self:sleep", "there are self:skip, self:skip=LAYERS, self:first=N and self:int8"),
        ("self:int8", "float32"),
    ],
)
def test_a_draft_of_the_target_that_cannot_be_is_refused_at_construction(own: LLM, draft: str, why: str) -> None:
    with pytest.raises(LeapaheadError, match=why):
        LLM(own.target, tokenizer=own.tokenizer, drafter="draft_model", draft=draft)
    with pytest.raises(Refused, match=r"needs a model of Transformers; for a GGUF file"):
        LLM(ToyTarget(), drafter="auto", draft=draft)


def test_needs_are_told_before_any_text() -> None:
    assert CHAIN in DraftModel.needs
    with pytest.raises(Refused, match=r"drafter 'draft_model' needs chain"):
        LLM(NoChains(), drafter="draft_model", draft=ToyTarget())
