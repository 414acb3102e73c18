"""Training of heads: what is trained is what is drafted, and a resumed training is the same one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import heads  # noqa: E402
from training_parts import KINDS, QUIET, VOCABULARY, made, model_of, settings_of, stopping, texts_of  # noqa: E402

from leapahead import Engine, Request, SamplingParams, StopParams  # noqa: E402
from leapahead.bench.conditions import silent  # noqa: E402
from leapahead.core.errors import LeapaheadError  # noqa: E402
from leapahead.core.stats import Stats  # noqa: E402
from leapahead.models import loading  # noqa: E402
from leapahead.planner.acceptance import AcceptanceTable  # noqa: E402
from leapahead.training import evaluate, export, loop, losses, recipes  # noqa: E402
from leapahead.training.attention import DraftedAttention  # noqa: E402
from leapahead.training.batches import Order, batch_of  # noqa: E402
from leapahead.training.evaluate import CANDIDATES, DEPTH, FRONTIER, NODES  # noqa: E402
from leapahead.training.features import Online, TrainingTarget, training_target  # noqa: E402
from leapahead.training.optimizer import BETAS, Optimizer  # noqa: E402
from leapahead.training.recipe import Goal, Recipe  # noqa: E402
from leapahead.training.settings import LOSSES, MOST_SEED  # noqa: E402
from leapahead.training.texts import Text  # noqa: E402


@pytest.fixture(scope="module")
def model() -> Any:
    return model_of()


@pytest.fixture(scope="module")
def target(model: Any) -> TrainingTarget:
    return training_target(loading.load(model).target)


@pytest.fixture(scope="module")
def texts(model: Any) -> list[Text]:
    return texts_of(model)


# ------------------------------------------------------------------------------------------------------- losses


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_its_formula(name: str) -> None:
    draw = np.random.default_rng(0)
    one, other, tokens = draw.normal(size=(6, 9)), draw.normal(size=(6, 9)), draw.integers(0, 9, 6)
    q, p = (np.exp(each) / np.exp(each).sum(-1, keepdims=True) for each in (one, other))
    expected = {
        "ce": -np.log(q[np.arange(6), tokens]),
        "soft_ce": -(p * np.log(q)).sum(-1),
        "kl": (p * np.log(p / q)).sum(-1),
        "reverse_kl": (q * np.log(q / p)).sum(-1),
        "jsd": 0.5 * (p * np.log(2 * p / (p + q)) + q * np.log(2 * q / (p + q))).sum(-1),
        "tv": 1 - np.minimum(p, q).sum(-1),
    }[name]
    found = losses.LOSSES[name](torch.tensor(one), torch.tensor(other), torch.tensor(tokens))
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-10)


def test_smooth_l1_is_quadratic_near_and_linear_far() -> None:
    found = losses.smooth_l1(torch.tensor([[0.5, 3.0]]), torch.zeros(1, 2))
    assert found.tolist() == pytest.approx([(0.5 * 0.25 + 2.5) / 2])


# ------------------------------------------------------------------------------------------- what is trained


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_training_computes_what_drafting_computes(kind: str, model: Any, target: TrainingTarget, texts: Any) -> None:
    """Every depth of every row, in a batch with texts of other lengths, against the head run over the whole text."""
    own = recipes.recipe(target, settings_of(kind, depths=3), texts)
    with torch.no_grad():
        for each in own.parameters.values():
            each.add_(0.2 * torch.randn(each.shape, generator=torch.Generator().manual_seed(1)))
    some = [texts[4], replace(texts[9], answer=texts[9].answer[:9])]
    batch = batch_of(some, Online(target, own.layers), 100, 32)
    with torch.no_grad():
        states = list(own.states(batch, None))
    checked, chained = 0, getattr(own.config, "is_chained", False)
    for depth in range(own.depths):
        for row, place in zip(*(each.tolist() for each in batch.rows_at(depth)), strict=True):
            tokens, layers = some[row].tokens, own.config.layers_of(2)
            committed, path = tokens[: place + 2], tokens[place + 2 : place + 2 + depth]
            expected = heads.recomputed(model, own.module, layers, committed, path)
            state = states[depth][row, place - batch.first]
            found = (
                own.module.one(state, torch.tensor(tokens[place + 1 + depth])) if chained else own.logits(depth, state)
            ).detach()
            np.testing.assert_allclose(found.numpy(), expected, atol=2e-5 * np.abs(expected).max())
            checked += 1
    rows = sum(len(text.answer) - (len(text.prompt) == 1) for text in some)
    assert checked == sum(rows - depth * len(some) for depth in range(own.depths))


def test_a_block_is_trained_as_if_it_were_alone(target: TrainingTarget, texts: Any) -> None:
    """Blocks side by side do not see one another, and each learns what is behind its own place."""
    own = recipes.recipe(target, settings_of("dflash", depths=3), texts)
    batch = batch_of([texts[4], texts[9]], Online(target, own.layers), 100, 32)
    text, position = (each[::5] for each in batch.rows_at(2))
    drawn = torch.zeros_like(batch.tokens, dtype=torch.bool)
    drawn[text, position] = True
    with torch.no_grad():
        together = Recipe.loss(own, replace(batch, drawn=drawn)).loss
        alone = []
        for row, place in zip(text.tolist(), position.tolist(), strict=True):
            one = torch.zeros_like(drawn)
            one[row, place] = True
            alone.append(Recipe.loss(own, replace(batch, drawn=one)).loss)
        torch.testing.assert_close(together, torch.stack(alone).mean())
        few = own.loss(replace(batch), torch.Generator().manual_seed(0))
    assert len(alone) > 3
    assert few.agreement.shape == (3,)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_falls(kind: str, target: TrainingTarget, texts: Any, tmp_path: Path) -> None:
    _, training = made(target, texts, settings_of(kind), tmp_path / "checkpoint")
    points = training.run(QUIET).points
    assert [point[0] for point in points] == [10, 20, 30]
    assert points[2][1] < 0.9 * points[0][1]


@pytest.mark.parametrize("loss_of", ["ce", "soft_ce"])
def test_the_selector_learns_what_follows(loss_of: str, target: TrainingTarget, texts: Any) -> None:
    """Its loss is that of the head among the candidates, which the text's token joins in place of the last one."""
    own = recipes.recipe(target, settings_of("dflash2", depths=3, loss=loss_of), texts)
    with torch.no_grad():
        own.module.candidate_selector.successor_codebook.normal_()
        states, before = torch.randn(3, 32), torch.tensor([5, 6, 7])
        logits = own.logits(0, states)
        best = logits.topk(16).indices
        tokens = torch.stack((best[0, 3], best[1, 15], logits[2].argmin()))  # the last one is no candidate
        loss, likeliest = own.row_loss(
            0, states, Goal(tokens, before, target.logits(states) if loss_of != "ce" else states[:, :0], states)
        )
        for row in range(3):
            chosen = best[row].tolist() if row < 2 else [*best[row, :15].tolist(), int(tokens[row])]
            context = own.module.candidate_selector.predecessor_codebook[before[row]] * (
                own.module.candidate_selector.hidden_projection(states[row])
            )
            scores = logits[row] + own.module.candidate_selector.successor_codebook @ context
            place, wanted = chosen.index(int(tokens[row])), target.logits(states[row])
            if loss_of == "ce":
                hard = -logits[row].log_softmax(-1)[tokens[row]] - scores[chosen].log_softmax(-1)[place]
                torch.testing.assert_close(loss[row], hard)
            else:
                soft = -(wanted.softmax(-1) * logits[row].log_softmax(-1)).sum()
                own_share = wanted[chosen].softmax(-1)
                torch.testing.assert_close(loss[row], soft - (own_share * scores[chosen].log_softmax(-1)).sum())
            right = chosen[int(scores[chosen].argmax())]
            assert likeliest[row] == (right if row < 2 else -1)


def test_a_new_medusa_predicts_what_the_target_does(target: TrainingTarget, texts: Any) -> None:
    own = recipes.recipe(target, settings_of("medusa"), texts)
    states = torch.randn(3, 32)
    for depth in range(5):
        torch.testing.assert_close(own.module.one(depth, states), target.logits(states))


def test_what_is_the_targets_is_not_trained(target: TrainingTarget, texts: Any, tmp_path: Path) -> None:
    before = [each.clone() for each in (target.embedding, target.output)]
    own, training = made(target, texts, settings_of("eagle", steps=5), tmp_path / "checkpoint")
    training.run(QUIET)
    assert not {"embed_tokens.weight", "lm_head.weight"} & own.parameters.keys()
    assert torch.equal(before[0], target.embedding)
    assert torch.equal(before[1], target.output)


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_trains(loss: str, target: TrainingTarget, texts: Any, tmp_path: Path) -> None:
    _, training = made(target, texts, settings_of("eagle3", loss=loss, draft_vocab=40), tmp_path / "checkpoint")
    points = training.run(QUIET).points
    assert points[2][1] < points[0][1]


def test_the_order_is_a_function_of_the_number(texts: Any) -> None:
    order = Order(texts, 5, seed=3)
    numbers = [[text.index for text in order[number]] for number in range(12)]
    assert [[text.index for text in Order(texts, 5, seed=3)[number]] for number in (11, 2)] == [numbers[11], numbers[2]]
    for epoch in range(3):
        seen = [index for batch in numbers[4 * epoch : 4 * epoch + 4] for index in batch]
        assert len(set(seen)) == len(seen) == 20
    assert numbers[:4] != numbers[4:8]


def test_muon_changes_hidden_matrices_alone(target: TrainingTarget, texts: Any, tmp_path: Path) -> None:
    own, training = made(target, texts, settings_of("medusa", optimizer="muon", steps=1), tmp_path / "checkpoint")
    training.run(QUIET)
    kept: dict[str, set[str]] = {}
    for name in training.optimizer.tensors():
        place, _, what = name.partition(".")
        kept.setdefault(list(own.parameters)[int(place)], set()).add(what)
    assert {name for name, found in kept.items() if found == {"momentum_buffer"}} == {
        f"blocks.{depth}.layers.0.weight" for depth in range(5)
    }
    assert {name for name, found in kept.items() if "exp_avg_sq" in found} == {
        f"lm_heads.{depth}.weight" for depth in range(5)
    }


def test_a_step_of_muon_goes_as_far_in_all_directions() -> None:
    matrix = torch.nn.Parameter(torch.zeros(8, 4))
    matrix.grad = torch.diag(torch.tensor([1.0, 0.5, 0.2, 0.1])).repeat(2, 1)
    Optimizer("muon", {"fc.weight": matrix}).step(0.5)
    steps = torch.linalg.svdvals(matrix.detach()) / (0.5 * 0.2 * 8**0.5)  # the scale of 2502.16982, equation 4
    assert steps.min() > 0.6
    assert steps.max() < 1.3
    assert matrix.grad is None


def test_the_logits_of_the_target_are_computed_where_a_loss_reads_them(target: TrainingTarget, texts: Any) -> None:
    batch = batch_of(texts[:3], Online(target, (2,)), 100, 32)
    widths = {}
    for loss in ("ce", "soft_ce"):
        own = recipes.recipe(target, settings_of("medusa", loss=loss, draft_vocab=20), texts)
        widths[loss] = own._goals(batch)[0].logits.shape[1]
        assert own.loss(batch).loss.isfinite()
    assert widths == {"ce": 0, "soft_ce": 20}


def test_adamw_is_one_kernel_on_a_cpu() -> None:
    """With the weights of the one that passes over them for each operation."""
    own, other = (torch.nn.Parameter(torch.arange(6.0).reshape(2, 3)) for _ in range(2))
    optimizer, reference = (
        Optimizer("adamw", {"embed": own}),
        torch.optim.AdamW([other], betas=BETAS, weight_decay=0.01),
    )
    assert optimizer._parts[0][1].defaults["fused"]
    for step in range(1, 4):
        own.grad, other.grad = (torch.full((2, 3), 0.1 * step) for _ in range(2))
        optimizer.step(0.01)
        reference.param_groups[0]["lr"] = 0.01
        reference.step()
    assert torch.allclose(own, other, atol=1e-6)


def test_trainings_do_not_emulate_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulated products have the precision of bfloat16 without its speed."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    assert isinstance(loop.autocast(torch.device("cuda")), nullcontext)


def test_muon_is_refused_where_pytorch_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon")
    parameters = {"fc.weight": torch.nn.Parameter(torch.zeros(2, 2))}
    Optimizer("adamw", parameters)
    with pytest.raises(LeapaheadError, match=r"optimizer='muon' needs PyTorch 2\.9 or newer"):
        Optimizer("muon", parameters)


# --------------------------------------------------------------------------------------------- a resumed training


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_training_is_the_same(kind: str, target: TrainingTarget, texts: Any, tmp_path: Path) -> None:
    settings = settings_of(kind, steps=9, accumulate=2)
    whole, training = made(target, texts, settings, tmp_path / "whole")
    training.run(QUIET)
    _, first = made(target, texts, settings, tmp_path / "parts")
    assert first.run(replace(QUIET, interrupts=stopping(4))).step == 4
    assert not first.is_done
    resumed, second = made(target, texts, settings, tmp_path / "parts")
    state = second.run(QUIET)
    assert (state.step, state.loss) == (9, training.state.loss)
    for name, each in whole.parameters.items():
        assert torch.equal(each, resumed.parameters[name]), name


def test_a_loss_that_is_no_number_ends_the_training(target: TrainingTarget, texts: Any, tmp_path: Path) -> None:
    own, training = made(target, texts, settings_of("eagle3"), tmp_path / "checkpoint")
    own.module.fc.weight.data[0, 0] = torch.nan
    with pytest.raises(LeapaheadError, match=r"loss of step 1 is not a finite number; .*--resume .* lr=0.005"):
        training.run(QUIET)


@pytest.mark.parametrize(
    ("error", "batch", "remedy"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), 4, "go on with --resume, batch=2 and accumulate=6"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 99, "batch=12 and accumulate=6"),
        (torch.OutOfMemoryError("CUDA out of memory."), 1, "begin a new folder with fewer max_new_tokens"),
    ],
)
def test_a_step_without_enough_memory_ends_the_training_in_one_sentence(
    target: TrainingTarget,
    texts: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    batch: int,
    remedy: str,
) -> None:
    own, training = made(target, texts, settings_of("eagle3", batch=batch, accumulate=3), tmp_path / "checkpoint")

    def loss(*args: Any) -> Any:
        raise error

    monkeypatch.setattr(own, "loss", loss)
    size = min(batch, len(texts))
    with pytest.raises(LeapaheadError, match=f"out of memory in a training step, batch {size}, on cpu; .*{remedy}"):
        training.run(QUIET)


def test_a_batch_of_tokens_that_the_head_cannot_propose_is_no_error(
    target: TrainingTarget, texts: Any, tmp_path: Path
) -> None:
    settings = settings_of("medusa", steps=1, batch=1, draft_vocab=2)
    _, training = made(target, [Text(0, [1], [62, 63])], settings, tmp_path / "checkpoint")
    training.recipe._draft_ids[63] = -1  # type: ignore[attr-defined]
    assert training.run(QUIET).loss == 0.0


def test_a_broken_checkpoint_is_named(target: TrainingTarget, texts: Any, tmp_path: Path) -> None:
    (tmp_path / "checkpoint").write_bytes(b"nothing")
    with pytest.raises(LeapaheadError, match=r"checkpoint cannot be used: .*; remove it, and --resume trains from"):
        made(target, texts, settings_of("eagle3"), tmp_path / "checkpoint")


def test_a_checkpoint_of_another_network_is_refused(target: TrainingTarget, texts: Any, tmp_path: Path) -> None:
    """One with more heads filled those that there are, and their optimizer with the numbers of others."""
    made(target, texts, settings_of("medusa", steps=1), tmp_path / "checkpoint")[1].run(QUIET)
    for kind, given in (("medusa", {"depths": 2}), ("eagle3", {})):
        with pytest.raises(LeapaheadError, match="checkpoint cannot be used: its weights are those of another network"):
            made(target, texts, settings_of(kind, **given), tmp_path / "checkpoint")


def test_a_checkpoint_of_other_texts_is_refused(target: TrainingTarget, texts: Any, tmp_path: Path) -> None:
    """With further texts, others are held out, which it may have been trained on, and a draft vocabulary has others."""
    settings = settings_of("medusa", steps=2)
    made(target, texts[:12], settings, tmp_path / "checkpoint")[1].run(replace(QUIET, interrupts=stopping(1)))
    for some in (texts, [replace(texts[0], answer=[5, 5]), *texts[1:12]]):
        with pytest.raises(LeapaheadError, match=r"cannot be used: it was trained on other texts, .*; remove it, and"):
            made(target, some, settings, tmp_path / "checkpoint")
    assert made(target, texts[:12], settings, tmp_path / "checkpoint")[1].run(QUIET).step == 2


def test_the_largest_seeds_are_possible(target: TrainingTarget, texts: Any, tmp_path: Path) -> None:
    """Such as the clock's nanoseconds."""
    _, training = made(target, texts, settings_of("eagle", steps=1, seed=MOST_SEED - 1), tmp_path / "checkpoint")
    assert training.run(QUIET).step == 1


def test_a_last_step_that_diverges_ends_the_training(target: TrainingTarget, texts: Any, tmp_path: Path) -> None:
    _, training = made(target, texts, settings_of("eagle", steps=1, lr=1e38), tmp_path / "checkpoint")
    with pytest.raises(LeapaheadError, match=r"after step 1 is not a finite number; .*--resume .* lr=1e\+38"):
        training.run(QUIET)
    assert not (tmp_path / "checkpoint").exists()


def test_the_end_by_the_clock(target: TrainingTarget, texts: Any, tmp_path: Path) -> None:
    times = iter(range(0, 10_000, 7))
    _, training = made(target, texts, settings_of("medusa", steps=None, minutes=1), tmp_path / "checkpoint")
    state = training.run(replace(QUIET, clock=lambda: float(next(times))))
    assert state.seconds >= 60
    assert state.step == 8


# ---------------------------------------------------------------------------------------------------- evaluation


def naive(
    logits: Callable[[list[int]], Any], ids: Sequence[int], nodes: int, frontier: int, candidates: int
) -> list[list[int]]:
    """The paths of a tree, grown one node at a time."""
    found: list[tuple[float, list[int]]] = []
    level: list[tuple[float, list[int]]] = [(0.0, [])]
    for _ in range(DEPTH):
        below = []
        for score, path in level:
            values = np.asarray(logits(path))
            logp = values - values.max() - np.log(np.exp(values - values.max()).sum())
            below += [(score + logp[k], [*path, ids[k]]) for k in np.argsort(-logp, kind="stable")[:candidates]]
        found += below
        level = sorted(below, key=lambda each: -each[0])[:frontier]
    return [path for _, path in sorted(found, key=lambda each: -each[0])[:nodes]]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_acceptance_is_that_of_drafting_place_by_place(
    kind: str, model: Any, target: TrainingTarget, texts: Any, tmp_path: Path
) -> None:
    draft_vocab = 0 if kind in ("eagle", "dflash", "dflash2") else 50
    own, training = made(target, texts, settings_of(kind, draft_vocab=draft_vocab), tmp_path / "checkpoint")
    training.run(QUIET)
    text = texts[7]
    (found,) = evaluate.evaluate(own, Online(target, own.layers), {"one": [text], "none": []}, silent)
    ids = list(range(VOCABULARY)) if own.vocabulary is None else own.vocabulary.tolist()
    steps, reached, right = {}, [0] * DEPTH, [0] * DEPTH
    for shape in ((DEPTH, 1, 1), (NODES, FRONTIER, CANDIDATES)):
        counts = []
        for place in range(len(text.prompt) - 1, len(text.tokens) - 1):
            committed, below = text.tokens[: place + 1], text.tokens[place + 1 :]

            def logits(path: list[int], committed: list[int] = committed) -> Any:
                return heads.recomputed(model, own.module, own.config.layers_of(2), committed, path)

            paths = naive(logits, ids, *shape)
            counts.append(max((len(path) for path in paths if path == below[: len(path)]), default=0))
            if shape[1] == 1:
                for depth in range(min(DEPTH, len(below))):
                    reached[depth] += counts[-1] >= depth
                    right[depth] += counts[-1] > depth
        steps[shape[1]] = evaluate.passes(counts)
    assert found.name == "one"
    assert found.tokens == len(text.answer)
    assert found.chain == pytest.approx(found.tokens / steps[1])
    assert found.tree == pytest.approx(found.tokens / steps[FRONTIER])
    assert found.depths == pytest.approx([r / max(1, n) for r, n in zip(right, reached, strict=True)])
    assert found.tree > 1


@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
def test_the_memory_of_an_evaluation_is_bounded(
    kind: str, target: TrainingTarget, texts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of a long text are computed once, and at few of its places is drafted together."""
    own = recipes.recipe(target, settings_of(kind), texts)
    text = texts[7]
    expected = evaluate.evaluate(own, Online(target, own.layers), {"one": [text]}, silent)
    shapes, attend = [], DraftedAttention.__call__

    def noting(self: DraftedAttention, layer: int, q: Any, k: Any, v: Any) -> Any:
        shapes.append((q.shape[0], q.shape[2]))
        return attend(self, layer, q, k, v)

    monkeypatch.setattr(DraftedAttention, "__call__", noting)
    monkeypatch.setattr(evaluate, "ROWS", 3 * len(text.tokens))
    assert evaluate.evaluate(own, Online(target, own.layers), {"one": [text]}, silent) == expected
    assert shapes.count((1, len(text.tokens) - 1)) == 1
    assert max(places for places, _ in shapes) == 3


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_a_draft_vocabulary_smaller_than_the_candidates(kind: str, target: TrainingTarget, texts: Any) -> None:
    own = recipes.recipe(target, settings_of(kind, draft_vocab=3), texts)
    (found,) = evaluate.evaluate(own, Online(target, own.layers), {"one": texts[:1]}, silent)
    assert found.tree >= found.chain >= 1


@pytest.mark.parametrize("kind", ["medusa", "peagle", "dflash2"])
def test_no_token_is_right_at_a_depth_that_a_head_does_not_have(kind: str, target: TrainingTarget, texts: Any) -> None:
    """Of equal logits, the first token is the likeliest; in many vocabularies it ends a text."""
    own = recipes.recipe(target, settings_of(kind, depths=2), texts)
    own.logits = lambda depth, states: torch.zeros(*states.shape[:-1], VOCABULARY)  # type: ignore[method-assign]
    ended = Text(0, [1, 2], [0] * 12)
    (found,) = evaluate.evaluate(own, Online(target, own.layers), {"one": [ended]}, silent)
    assert found.depths[2:] == (0.0, 0.0, 0.0)
    assert found.chain <= 3


def test_passes() -> None:
    assert evaluate.passes([0, 0, 0]) == 3
    assert evaluate.passes([2, 0, 0, 1, 0]) == 2
    assert evaluate.passes([5]) == 1


class ByRank(AcceptanceTable):
    """Estimates that only know the rank of a candidate, so that a chain consists of first candidates."""

    def estimate(self, key: Any, unknown: float = 0.0) -> float:
        return 0.6 / (1 + int(key[2])) if len(key) > 2 else 0.6

    def learn(self, key: Any, hit: bool) -> None:
        pass


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_decoding_accepts_what_the_evaluation_predicts(
    kind: str, model: Any, target: TrainingTarget, texts: Any, tmp_path: Path
) -> None:
    own, training = made(target, texts, settings_of(kind, steps=40), tmp_path / "checkpoint.safetensors")
    training.run(QUIET)
    export.export(own, tmp_path / "head")
    some = [text for text in texts if len(text.prompt) > 1]  # of one token there is no hidden state to draft from
    (expected,) = evaluate.evaluate(own, Online(target, own.layers), {"all": some}, silent)
    engine = Engine(loading.load(model).target, acceptance=ByRank())
    drafter = engine.drafter("head", head=str(tmp_path / "head"), nodes=DEPTH, depth=DEPTH, chain=True)
    stats = Stats()
    for text in some:
        handle = engine.submit(
            Request(text.prompt, drafter, SamplingParams(), StopParams(max_new_tokens=len(text.answer)))
        )
        engine.run([handle])
        assert handle.tokens == text.answer
        stats = stats + handle.stats
    assert stats.acceptance_length == pytest.approx(expected.chain, rel=0.01)  # of equal logits, either may be first
    assert expected.chain > 1.05
