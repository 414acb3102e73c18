"""TriForce: the target drafts over a retrieved part of its cache, which is a copy of the best chunks."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from architectures import BY_NAME
from helpers import GREEDY, Run, run

from leapahead import Engine, Request
from leapahead.core.errors import BadParameter, ContextOverflow, LeapaheadError, Refused
from leapahead.core.sampling import Sampler, SamplingParams
from leapahead.core.stop import StopParams
from leapahead.core.tree import TokenTree
from leapahead.core.verify import Verdict
from leapahead.drafters import registry
from leapahead.drafters.triforce import Following, TriForce
from leapahead.models.base import read_prompt
from leapahead.models.self_draft import retrieval as self_draft
from leapahead.models.self_draft.retrieval import RetrievalDraft
from leapahead.models.toy import ToyTarget
from leapahead.models.transformers import retrieval
from leapahead.models.transformers.model import TransformersSession, TransformersTarget
from leapahead.models.transformers.retrieval import Layout, Retrieval, Retrieved
from leapahead.models.transformers.static.graphs import Calls
from leapahead.planner.draft import SequenceView
from research import plots
from research import retrieval_costs as costs_of
from research.retrieval_costs import measured

WARM = SamplingParams(temperature=1.0, seed=3)
STOP = StopParams(max_new_tokens=24)
WHOLE = {"budget": 1000, "shortest": 0}  # the middle level is the target


def model(name: str = "llama", seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(seed)
    return replace(BY_NAME[name], options={**BY_NAME[name].options, **options}).build()


@pytest.fixture(scope="module")
def target() -> TransformersTarget:
    return TransformersTarget(model())


@pytest.fixture(scope="module")
def small() -> TransformersTarget:
    """The target's weights, as a model of its own: its guesses are right where its window shows enough."""
    return TransformersTarget(model())


def prompt(length: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(5, 100, length)]


def opened(target: TransformersTarget, tokens: list[int]) -> TransformersSession:
    """A session whose prompt is read."""
    session = target.open(tokens, GREEDY)
    read_prompt(target, session)
    return session


def logits_after(draft: RetrievalDraft, session: Any, path: tuple[int, ...] = (), computed: int = 0) -> Any:
    """The draft's logits after a path from the text's last token, float32 [vocab]."""
    with draft.lock:
        return draft.step([session], [TokenTree.chain(session.tokens[-1], path)], [computed])[0].logits[-1]


def grow(target: TransformersTarget, session: TransformersSession, *tokens: int) -> None:
    """Commits tokens; the last is the next root."""
    target.step([session], [TokenTree.chain(session.tokens[-1], tokens[:-1])])
    session.commit(Verdict(tuple(range(len(tokens))), tokens, len(tokens) - 1))


# -------------------------------------------------------------------------------------------------------- the text


@pytest.mark.slow
@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "options",
    [
        {"budget": 32},
        {"budget": 40, "chunk": 5, "refresh": 3, "depth": 3},
        {"budget": 64, "chunk": 1, "refresh": 1},
        {"budget": 32, "chunk": 4, "small": True, "draft_window": 40},
        {"budget": 48, "small": True, "draft_depth": 4, "draft_window": 0},
        {"budget": 200, "small": True, "draft_window": 40},  # longer than the text: the small model drafts alone
    ],
    ids=str,
)
def test_the_text_is_plain_decoding_s(
    target: TransformersTarget, small: TransformersTarget, params: SamplingParams, options: dict[str, Any]
) -> None:
    given = {key: value for key, value in options.items() if key != "small"}
    drafter = TriForce(**given, draft=small if options.get("small") else None)
    plain = run(target, prompt=prompt(100), params=params, stop=STOP)
    drafted = run(target, drafter, prompt=prompt(100), params=params, stop=STOP)
    assert drafted.tokens == plain.tokens
    assert drafted.stats.drafted > 0
    used = {"draft"} if options["budget"] > 100 else {"retrieval", "draft"} if options.get("small") else {"retrieval"}
    assert set(drafted.stats.drafted_by) == used


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama_mqa", "gpt2", "qwen2", "qwen3_moe", "gpt_neox", "phi", "cohere", "olmo2"])
@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "sampled"])
def test_the_text_of_a_family_is_plain_decoding_s(name: str, params: SamplingParams) -> None:
    target = TransformersTarget(model(name))
    plain = run(target, prompt=prompt(100), params=params, stop=STOP).tokens
    for options in ({"budget": 32, "chunk": 4}, {"budget": 64, "refresh": 2}, WHOLE):
        assert run(target, TriForce(**options), prompt=prompt(100), params=params, stop=STOP).tokens == plain


@pytest.mark.slow
def test_a_batch_gives_each_its_own_text(target: TransformersTarget, small: TransformersTarget) -> None:
    """Greedy and sampled, of different lengths, with and without the middle level; and again, from the cache."""
    lengths, kinds = (40, 70, 97, 150), (GREEDY, WARM, GREEDY, replace(WARM, temperature=0.7, top_k=20))
    plain = [run(target, prompt=prompt(n, n), params=p, stop=STOP).tokens for n, p in zip(lengths, kinds, strict=True)]
    engine = Engine(target)
    drafter = engine.drafter("triforce", budget=48, refresh=4, draft=small, draft_window=40)
    for _ in range(2):
        handles = [engine.submit(Request(prompt(n, n), drafter, p, STOP)) for n, p in zip(lengths, kinds, strict=True)]
        engine.run(handles)
        assert [each.tokens for each in handles] == plain
    blocks = drafter.middle.target.blocks  # type: ignore[attr-defined]
    assert not any(row.busy for row in blocks.cache.rows)


def test_penalties_and_an_early_end(target: TransformersTarget) -> None:
    """The middle chooses with the request's own parameters, and a draft may reach beyond the end of the text."""
    params = SamplingParams(temperature=1.0, seed=5, repetition_penalty=1.3, presence_penalty=0.5, top_p=0.9)
    text = run(target, prompt=prompt(90), params=params, stop=STOP).tokens
    for stop in (replace(STOP, max_new_tokens=7), replace(STOP, stop_token_ids=(text[9],))):
        plain = run(target, prompt=prompt(90), params=params, stop=stop)
        drafted = run(target, TriForce(**WHOLE), prompt=prompt(90), params=params, stop=stop)
        assert (drafted.tokens, drafted.finish) == (plain.tokens, plain.finish)
        assert drafted.stats.accepted == drafted.stats.drafted or "stop" in str(drafted.finish)


# ---------------------------------------------------------------------------------------------------- the retrieval


def exact_part(done: Run) -> float:
    """The part of the drafted tokens that was accepted."""
    return done.stats.accepted / done.stats.drafted


@pytest.mark.slow
@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("options", [{}, {"chunk": 3, "refresh": 1}, {"chunk": 7, "refresh": 5, "depth": 4}], ids=str)
def test_with_a_budget_for_the_whole_text_every_token_is_accepted(
    target: TransformersTarget, params: SamplingParams, options: dict[str, Any]
) -> None:
    done = run(target, TriForce(**WHOLE, **options), prompt=prompt(60), params=params, stop=STOP)
    assert done.stats.drafted >= 15
    assert exact_part(done) == 1.0


@pytest.mark.slow
def test_a_target_with_captured_forwards() -> None:
    """Whose commits may be outstanding when entries are copied."""
    target = TransformersTarget(model(), static=Calls())
    plain = run(target, prompt=prompt(60), params=WARM, stop=STOP)
    done = run(target, TriForce(**WHOLE), prompt=prompt(60), params=WARM, stop=STOP)
    assert done.tokens == plain.tokens
    assert exact_part(done) == 1.0


def test_right_guesses_of_the_small_model_spare_forwards(target: TransformersTarget, small: TransformersTarget) -> None:
    drafter = TriForce(**WHOLE, draft=small, draft_depth=2, draft_window=0)
    done = run(target, drafter, prompt=prompt(60), stop=STOP)
    assert exact_part(done) == 1.0
    steps = done.stats.steps
    assert done.stats.drafter["retrieval"]["forwards"] <= 2 * steps < done.stats.drafted / 2  # three tokens each
    assert done.stats.drafted_by["draft"] > done.stats.drafted_by["retrieval"]


def test_the_layout_keeps_to_the_budget() -> None:
    settings = Retrieval.of(64, 8, 32)
    assert settings.newest == 8
    assert settings.layout(5) == Layout(0, 0)
    for length in range(200):
        chunks, chosen = settings.layout(length)
        newest = length - 8 * chunks
        assert chosen <= chunks
        assert newest >= min(length, 8)
        assert 8 * chosen + newest == length if length <= 64 else 56 < 8 * chosen + newest <= 64


def test_the_chosen_chunks_are_those_of_a_brute_force_search(
    target: TransformersTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every layer and key head; and their entries, the newest and those committed since are what the block has."""
    seen: list[tuple[Any, Any]] = []
    choose = retrieval.best_chunks

    def watched(query: torch.Tensor, means: torch.Tensor, count: int, scaling: float | None) -> torch.Tensor:
        found = choose(query, means, count, scaling)
        seen.append((query.numpy().copy(), found.numpy().copy()))
        return found

    monkeypatch.setattr(retrieval, "best_chunks", watched)
    session = opened(target, prompt(121))
    draft = RetrievalDraft(target, settings := Retrieval.of(48, 4, 100))
    seen.clear()  # those of the rehearsal
    mine = draft.open(session.tokens, GREEDY)
    logits_after(draft, mine)
    grow(target, session, 7, 11)  # committed since
    logits_after(draft, mine)
    grow(target, session, 8, 9, 11)
    logits_after(draft, mine)
    layers = target.config.num_hidden_layers
    assert len(seen) == layers
    chunks, count = settings.layout(120)
    assert (chunks, count) == (28, 10)
    state = mine.state
    assert isinstance(state, Retrieved)
    block, length, shared = state.block, len(session.tokens) - 1, target.config.num_key_value_heads
    for layer in range(layers):
        query, chosen = seen[layer]
        theirs = [target.executor.cache.plane(layer, part)[session.state.row.index].numpy() for part in (0, 1)]
        ours = [draft.blocks.cache.plane(layer, part)[block.index].numpy() for part in (0, 1)]
        heads = len(query)
        for head in range(shared):
            means = [theirs[0][head, 4 * chunk : 4 * chunk + 4].mean(0) for chunk in range(chunks)]
            total = np.zeros(chunks)
            for each in range(head * heads // shared, (head + 1) * heads // shared):
                scores = np.exp([query[each] @ mean * target.model.model.layers[0].self_attn.scaling for mean in means])
                total += scores / scores.sum()
            best = sorted([0, *sorted(range(1, chunks), key=lambda chunk: -total[chunk])[: count - 1]])
            assert chosen[head].tolist() == best
            wanted = [slot for chunk in best for slot in range(4 * chunk, 4 * chunk + 4)]
            wanted += range(4 * chunks, length)
            for part in (0, 1):
                assert np.array_equal(ours[part][head, : len(wanted)], theirs[part][head, wanted])
    assert block.length == len(wanted)
    assert block.length + block.left_out == length


def test_chunks_are_chosen_again(target: TransformersTarget) -> None:
    made: list[Retrieved] = []
    drafter = TriForce(budget=48, refresh=10)
    engine = Engine(target)
    attached = engine.drafter(drafter)
    blocks: Any = drafter.middle.target.blocks  # type: ignore[attr-defined]
    keep = blocks.retrieved
    blocks.retrieved = lambda row: made.append(keep(row)) or made[-1]
    handle = engine.submit(Request(prompt(90), attached, GREEDY, StopParams(max_new_tokens=35)))
    engine.run([handle])
    assert [each.selections for each in made] == [4]  # after 0, 10, 20 and 30 tokens or soon after


def reference(target: TransformersTarget, tokens: list[int], visible: list[int]) -> Any:
    """The logits after a text whose last token attends only to these positions, by the model's own forward."""
    mask = torch.ones(len(tokens), len(tokens)).tril().bool()
    mask[-1] = False
    mask[-1, [*visible, len(tokens) - 1]] = True
    positions = torch.arange(len(tokens))[None]
    given = torch.tensor([tokens])
    with torch.no_grad():
        return target.model(given, attention_mask=mask[None, None], position_ids=positions).logits[0, -1]


@pytest.fixture
def one_layer() -> tuple[TransformersTarget, TransformersSession, RetrievalDraft]:
    """With one key head, so that one mask says what is chosen."""
    target = TransformersTarget(model("llama_mqa", num_hidden_layers=1))
    session = opened(target, prompt(121))
    return target, session, RetrievalDraft(target, Retrieval.of(48, 4, 100))


def gap(target: TransformersTarget, session: TransformersSession, draft: RetrievalDraft) -> float:
    """How far the draft is from the model that attends to what was chosen, after a draft that was not accepted."""
    chosen: list[int] = []
    mine = draft.open(session.tokens, GREEDY)
    logits_after(draft, mine)
    logits_after(draft, mine, (20, 21), computed=1)
    grow(target, session, 7, 8, 9, 11)
    found = logits_after(draft, mine)
    state = mine.state
    assert isinstance(state, Retrieved)
    entries = target.executor.cache.plane(0, 0)[session.state.row.index, 0]  # type: ignore[attr-defined]
    block = draft.blocks.cache.plane(0, 0)[state.block.index, 0, : state.settings.layout(120).chosen * 4 : 4]
    for key in block:
        chosen += [int(torch.nonzero((entries[:112] == key).all(-1))[0]) + at for at in range(4)]
    visible = [*chosen, *range(112, len(session.tokens) - 1)]
    return float((reference(target, list(session.tokens), visible) - found).abs().max())


def test_the_draft_is_the_model_that_attends_to_the_chosen_entries(one_layer: Any) -> None:
    target, session, draft = one_layer
    assert gap(target, session, draft) < 1e-5
    full = reference(target, list(session.tokens), list(range(len(session.tokens))))
    part = reference(target, list(session.tokens), list(range(100, len(session.tokens))))
    assert float((full - part).abs().max()) > 1e-3  # what is left out makes a difference


def test_entries_of_a_rejected_draft_that_stay_are_noticed(one_layer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    renew = Retrieved.renew
    monkeypatch.setattr(Retrieved, "renew", lambda self: stale(renew(self)))

    def stale(fill: Any) -> Any:
        return fill if fill.layout is not None else fill._replace(start=fill.stop)

    assert gap(*one_layer) > 1e-3


def test_positions_in_the_block_instead_of_the_text_are_noticed(
    one_layer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    renew = Retrieved.renew

    def wrong(self: Retrieved) -> Any:
        fill = renew(self)
        self.block.left_out = 0
        return fill

    monkeypatch.setattr(Retrieved, "renew", wrong)
    _, session, draft = one_layer
    wrong_positions = logits_after(draft, draft.open(session.tokens, GREEDY))
    monkeypatch.setattr(Retrieved, "renew", renew)
    right = logits_after(draft, draft.open(session.tokens, GREEDY))
    assert float((wrong_positions - right).abs().max()) > 1e-3


def test_copies_of_other_entries_are_noticed_when_it_is_made(
    target: TransformersTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose = retrieval.best_chunks
    monkeypatch.setattr(retrieval, "best_chunks", lambda *given: choose(*given).clamp(max=1))
    with pytest.raises(Refused, match="copied entries give logits that differ by"):
        RetrievalDraft(target, Retrieval.of(64, 8, 32))


def test_after_a_forward_that_failed_everything_is_copied_again(
    target: TransformersTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = RetrievalDraft(target, Retrieval.of(48, 4, 100))
    session = opened(target, prompt(121))
    mine, other = draft.open(session.tokens, GREEDY), draft.open(session.tokens, GREEDY)
    right = logits_after(draft, mine)
    with monkeypatch.context() as patch:
        patch.setattr(retrieval, "best_chunks", lambda *given: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            logits_after(draft, other)
    assert torch.equal(logits_after(draft, other), right)


# ---------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mistral", r"has layers of the kind sliding_attention, which attend to a part of the text by themselves"),
        ("falcon", r"cannot draft over a part of its cache \(its attention is not computed by Transformers'"),
        ("gpt_neo", r"takes no tree mask over a cache of all entries, so it cannot draft"),
        ("mamba2", r"has recurrent layers, whose state is not divided into entries"),
    ],
)
def test_a_model_whose_cache_has_no_parts_is_refused(name: str, message: str) -> None:
    with pytest.raises(Refused, match=message):
        RetrievalDraft(TransformersTarget(BY_NAME[name].build()), Retrieval.of(64, 8, 32))


def test_other_targets_are_refused() -> None:
    with pytest.raises(Refused, match=r"drafter 'triforce' needs a model of Transformers; use drafter='draft_model'"):
        Engine(ToyTarget()).drafter("triforce")
    with pytest.raises(Refused, match=r"is in exact mode, in which it cannot draft over a part of its cache"):
        Engine(TransformersTarget(model(), exact=True)).drafter("triforce")
    eager = model()
    eager.set_attn_implementation("eager")
    with pytest.raises(Refused, match=r"has 'eager' on cpu; load it with attn_implementation=\"sdpa\""):
        self_draft.retrievable(TransformersTarget(eager))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 31}, "budget=31 is not possible with chunk=8: it must hold at least 4 chunks; give budget=32"),
        ({"budget": 0}, "budget=0 is not possible"),
        ({"refresh": 0}, "refresh=0 is not possible"),
        ({"depth": 0}, "depth=0 is not possible"),
        ({"shortest": -1}, "shortest=-1 is not possible"),
        ({"draft": "a,b"}, "triforce takes one draft model"),
    ],
    ids=str,
)
def test_impossible_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadParameter, match=message):
        registry.make("triforce", **options)


@pytest.mark.slow
def test_a_small_model_that_cannot_follow_leaves_the_middle_alone(target: TransformersTarget) -> None:
    short = TransformersTarget(model(max_position_embeddings=128))
    with pytest.raises(BadParameter, match=r"draft_window=64 is too large for .* at most 47"):
        Engine(target).drafter("triforce", budget=48, draft=short, draft_window=64)
    drafter = TriForce(budget=48, draft=short, draft_window=0)
    done = run(target, drafter, prompt=prompt(140), stop=STOP)
    assert done.tokens == run(target, prompt=prompt(140), stop=STOP).tokens
    assert "context" in done.stats.drafter["draft"]["stopped"]
    assert set(done.stats.drafted_by) == {"retrieval"}


def test_an_interrupt_while_one_level_is_closed_leaves_the_cache_of_neither_taken() -> None:
    class Closing:
        is_open = True

        def close(self) -> None:
            if pending:
                raise pending.pop()
            self.is_open = False

    pending, middle, small = [KeyboardInterrupt()], Closing(), Closing()
    drafter, sequence = TriForce(), SequenceView(Sampler(GREEDY, [1, 2], 100))
    drafter._sequences[sequence] = Following(middle, small)  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        drafter.close(sequence)
    drafter.close(sequence)
    assert [middle.is_open, small.is_open] == [False, False]
    assert not drafter._sequences


def test_modules_that_were_replaced_are_an_error() -> None:
    """As for every draft model that is made of the target."""
    own = model()
    target = TransformersTarget(own)
    draft = RetrievalDraft(target, Retrieval.of(64, 8, 32))
    session = opened(target, prompt(20))
    own.model.norm = torch.nn.Identity()
    with pytest.raises(LeapaheadError, match="modules of the model were replaced"):
        draft.open(session.tokens, GREEDY)


# ------------------------------------------------------------------------------------------------- what it costs


def test_costs_are_measured_over_a_random_cache() -> None:
    target = TransformersTarget(model())
    found = measured(target, ToyTarget(context_length=600), [100, 200], [32], chunk=4, rounds=1)
    assert [row["context"] for row in found["rows"]] == [100, 200]
    for row in found["rows"]:
        assert all(ms > 0 for ms in row["target_ms"].values())
        assert all(ms > 0 for ms in row["budgets"]["32"]["middle_ms"].values())
    assert {(row["context"], row["small"]) for row in found["needed"]} == {(n, s) for n in (100, 200) for s in (0, 1)}
    json.dumps(found)
    with pytest.raises(ContextOverflow, match="250 tokens do not fit the context of 256"):
        measured(target, ToyTarget(context_length=600), [250], [32])
    assert len(plots.draw(found).axes) == 2


def test_the_simulated_speed_up_by_hand() -> None:
    """A draft of 1 token of which 50 % are accepted: 1.5 tokens in 11 + 3 + 1.5 * 8 / 4 milliseconds."""
    costs = {"middle_ms": {"1": 3.0, "2": 3.0, "3": 3.0, "4": 3.0}, "select_ms": 8.0}
    row = {"context": 1, "target_ms": {str(rows): 10.0 + rows - 1 for rows in range(1, 14)}, "budgets": {"8": costs}}
    found = {"conditions": {"refresh": 4}, "small_ms": 0.5, "rows": [row]}
    best = costs_of.best(found, row, "8", 0.5, small=False)
    by_hand = {
        depth: sum(0.5**each for each in range(depth + 1))
        * 10
        / (10 + depth + 3 * depth + 2 * sum(0.5**each for each in range(depth + 1)))
        for depth in costs_of.DEPTHS
    }
    assert by_hand[1] == 15 / 17
    assert best["speedup"] == round(max(by_hand.values()), 3) < 1
    certain = [costs_of.best(found, row, "8", 1.0, small)["speedup"] for small in (False, True)]
    assert certain[1] > certain[0] > 1
    assert costs_of.alone(found, row) == round((1 + 0.6 + 0.36) * 10 / (12 + 2 * 0.5), 3)
    rate = costs_of.needed(found)[0]["rate"]
    assert costs_of.best(found, row, "8", rate, small=False)["speedup"] > 1
    assert costs_of.best(found, row, "8", rate - 0.01, small=False)["speedup"] <= 1
