"""Choices that are made on the device for all sessions of a step: the same as those that are made row by row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from architectures import BY_NAME
from torch.utils._python_dispatch import TorchDispatchMode

from leapahead.core.arrays import chosen_of
from leapahead.core.noise import blocks
from leapahead.core.sampling import UNSETTLED, Sampler, SamplingParams
from leapahead.core.tree import TokenTree
from leapahead.models.choices import Choices, Rows
from leapahead.models.transformers import choosing
from leapahead.models.transformers.model import TransformersTarget

VOCABULARY = 50


def refuse(prefixes: Any, scores: Any) -> Any:
    raise ValueError("a processor of the user")


def twice(prefixes: Any, scores: Any) -> Any:
    return scores * 2


PARAMS = {
    "greedy": [SamplingParams()] * 3,
    "seeded": [SamplingParams(temperature=0.8, seed=seed) for seed in range(3)],
    "mixed": [SamplingParams(), SamplingParams(temperature=2.0, top_p=0.9), SamplingParams(bad_words=((3,),))],
    "one": [SamplingParams(temperature=1.2, top_k=5, min_p=0.01)],
    "processors": [SamplingParams(processors=(twice,)), SamplingParams(temperature=0.5, processors=(twice,))],
}


def step(params: list[SamplingParams], dtype: torch.dtype) -> tuple[list[Sampler], list[TokenTree], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    trees = [TokenTree.from_paths(7, [[1, 2], [3] * at]) for at in range(1, len(params) + 1)]
    logits = [(4 * torch.randn(len(tree), VOCABULARY, generator=generator)).to(dtype) for tree in trees]
    samplers = [Sampler(each, [5, 6, 7], VOCABULARY, torch.from_numpy, on_device=True) for each in params]
    return samplers, trees, logits


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("top_k", [0, 1, 4, 80])
def test_they_are_those_of_each_row(name: str, dtype: torch.dtype, top_k: int) -> None:
    samplers, trees, logits = step(PARAMS[name], dtype)
    found = choosing.choose(samplers, trees, logits, top_k)
    for known, sampler, tree, rows in zip(found, samplers, trees, logits, strict=True):
        lazy, eager = Choices(rows, tree, sampler), Choices(rows, tree, sampler, known.tokens, best=known.best)
        nodes = range(len(tree))
        assert known.tokens is not None
        assert eager.of(nodes).tolist() == lazy.of(nodes).tolist() == known.tokens.tolist()
        assert (known.best is None) == (top_k == 0)
        if known.best is not None:
            tokens, values = known.best
            assert tokens.flags.c_contiguous
            assert values.flags.c_contiguous
            assert tokens.shape == (len(tree), min(top_k, VOCABULARY))
            np.testing.assert_array_equal(values, np.sort(rows.double().numpy(), axis=1)[:, ::-1][:, : values.shape[1]])
            np.testing.assert_array_equal(values, np.take_along_axis(rows.double().numpy(), tokens, axis=1))
            assert eager.top_k(1)[0].tolist() == tokens[:, :1].tolist()


class Launches(TorchDispatchMode):
    """Counts operations that a device computes, each of which takes its start there, whatever its size."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_best_of_a_row_is_numpys(dtype: torch.dtype) -> None:
    """Of equal ones the first, and none where one is NaN or +inf, or all are -inf; in four operations."""
    random = np.random.default_rng(0)
    for _ in range(50):
        rows = random.integers(-3, 4, (40, int(random.integers(1, 70)))) * random.choice([1.0, 1e-3, 1e30])
        odd = random.choice([np.nan, np.inf, -np.inf, -0.0], rows.shape, p=[0.05, 0.05, 0.7, 0.2])
        rows = np.where(random.random(rows.shape) < random.choice([0.0, 0.05, 1.0], (40, 1)), odd, rows)
        scores = torch.from_numpy(rows).to(dtype)
        wide = scores.double().numpy()
        best = [int(np.argmax(row)) if np.isfinite(row.max()) else -1 for row in wide]
        with Launches() as launches:
            found = chosen_of(scores)
        assert launches.count <= 4
        assert found.dtype == torch.int64
        assert found.tolist() == best == chosen_of(wide).tolist() == [int(chosen_of(row[None])[0]) for row in wide]


def test_noise_is_made_in_few_operations() -> None:
    with Launches() as launches:
        blocks(3, range(16), torch.arange(50))
    assert launches.count <= 250


ALIKE = {
    "temperature": [SamplingParams(temperature=0.8, seed=seed) for seed in range(6)],
    "one": [SamplingParams(temperature=1.0, seed=seed) for seed in range(6)],
    "few": [SamplingParams(temperature=1.3, top_k=7, min_p=0.02, seed=seed) for seed in range(6)],
    "top-p": [SamplingParams(temperature=1.3, top_k=3000, top_p=0.9, seed=seed) for seed in range(6)],
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ALIKE)
def test_sessions_with_the_same_filters_are_chosen_for_at_once(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same choices as one by one, also those that are left open, in fewer operations."""
    vocabulary, generator = 5000, torch.Generator().manual_seed(1)
    trees = [TokenTree.from_paths(7, [[1, 2], [3] * at]) for at in range(1, 7)]
    together = torch.randn(sum(map(len, trees)), vocabulary, generator=generator).to(dtype)
    together[::5] = 0  # whose top-p waits for the device
    together[3, 9] = torch.nan
    together[4] = -torch.inf
    logits = list(together.split([len(tree) for tree in trees]))

    texts = [list(range(3 * at)) for at in range(1, 7)]
    given = zip(ALIKE[name], texts, strict=True)
    samplers = [Sampler(params, text, vocabulary, torch.from_numpy, on_device=True) for params, text in given]

    def one_by_one() -> torch.Tensor:
        parts = zip(samplers, logits, trees, strict=True)
        return torch.cat([each.choose(rows, tree, np.arange(len(tree)), settle=False) for each, rows, tree in parts])

    expected = one_by_one()  # and the noise, which is kept
    with Launches() as alone:
        one_by_one()
    with Launches() as at_once:
        able, found = choosing._chosen(samplers, trees, logits, together)
    assert (able, found.shape) == ([True] * 6, (len(together), 1))
    assert torch.equal(found[:, 0], expected)
    assert (UNSETTLED in found) == (name == "top-p")
    assert at_once.count < alone.count / 4
    monkeypatch.setattr(choosing, "MOST_ROWS", 9)
    assert torch.equal(choosing._chosen(samplers, trees, logits, together)[1], found)


def test_which_sessions_are_chosen_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those behind each other with the same filters, of up to so many rows, and no others."""
    sampled, other = SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_k=3)
    banned = SamplingParams(temperature=1.0, bad_words=((3,),))
    params = [sampled, sampled, other, SamplingParams(), SamplingParams(), banned, banned, sampled, sampled, sampled]
    samplers = [Sampler(each, [1], VOCABULARY, torch.from_numpy, on_device=True) for each in params]
    logits = [torch.zeros(2, VOCABULARY)] * len(params)
    monkeypatch.setattr(choosing, "MOST_ROWS", 5)
    found = [list(range(len(params)))[each] for each in choosing._alike(samplers, logits)]
    assert found == [[0, 1], [2], [3], [4], [5], [6], [7, 8], [9]]
    trees = [TokenTree.chain(1, [2])] * len(params)
    chosen = choosing.choose(samplers, trees, [torch.randn(2, VOCABULARY) for _ in params], 0)
    assert all(each.tokens is not None for each in chosen)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_log_sums_are_those_of_the_whole_rows(dtype: torch.dtype) -> None:
    rows = (100 * torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(0))).to(dtype)
    expected = rows.double().logsumexp(dim=-1).numpy()[[2, 0]]
    for logits in (rows, rows.double().numpy(), rows.float().numpy()):
        np.testing.assert_allclose(Rows(logits).log_sums([2, 0]), expected, rtol=1e-6)


def test_an_error_of_one_processor_concerns_its_session_alone() -> None:
    params = [SamplingParams(), SamplingParams(processors=(refuse,)), SamplingParams(temperature=1.0)]
    samplers, trees, logits = step(params, torch.float32)
    found = choosing.choose(samplers, trees, logits, top_k=2)
    assert [known.tokens is None for known in found] == [False, True, False]
    assert all(known.best is not None for known in found)
    choices = Choices(logits[1], trees[1], samplers[1], found[1].tokens)
    assert choices[0] == -1
    with pytest.raises(ValueError, match="of the user"):
        choices.check(0)


def test_what_the_device_leaves_open_is_chosen_afterwards() -> None:
    """Top-p over a flat distribution sorts more tokens than the device looks at without being asked."""
    vocabulary = 5000
    logits = [torch.zeros(2, vocabulary)]
    tree = TokenTree.chain(1, [2])
    params = SamplingParams(temperature=1.0, top_p=0.9)
    sampler = Sampler(params, [1], vocabulary, torch.from_numpy, on_device=True)
    (known,) = choosing.choose([sampler], [tree], logits, 0)
    assert known.tokens is not None
    assert known.tokens.tolist() == Choices(logits[0], tree, sampler).of([0, 1]).tolist()


def test_there_is_one_copy_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = []
    own = torch.Tensor.numpy

    def numpy(self: torch.Tensor, *, force: bool = False) -> Any:
        copies.append(tuple(self.shape))
        return own(self, force=force)

    for name in ("greedy", "seeded"):
        samplers, trees, logits = step(PARAMS[name], torch.float32)
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "numpy", numpy)
            choosing.choose(samplers, trees, logits, top_k=3)
        assert copies == [(sum(map(len, trees)), 1 + 2 * 3)]
        copies.clear()


def test_nothing_waits_for_a_copy_to_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With penalties, bans or a grammar, the copies are made while the forward runs."""
    target = TransformersTarget(BY_NAME["llama"].build())
    log = list[object]()

    def to(self: torch.Tensor, device: torch.device, non_blocking: bool = False) -> torch.Tensor:
        log.append((device.type, tuple(self.shape), non_blocking))
        return self

    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: log.append("pinned") or self)
    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(target, "device", torch.device("cuda"))
    monkeypatch.setattr(target, "_on_host", False)
    target._sampler(SamplingParams(bad_words=((3,), (4,))), [1])
    assert log == ["pinned", ("cuda", (2,), True)]
    log.clear()
    choosing.to_device(np.zeros(0), torch.device("cuda"))
    choosing.to_device(np.zeros(1), torch.device("cpu"))
    assert log == [("cuda", (0,), False), ("cpu", (1,), False)]


class OnMps(torch.Tensor):
    """A tensor of a device without float64, which numpy cannot read."""

    @property
    def device(self) -> torch.device:
        return torch.device("mps")

    def cpu(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)

    def double(self) -> torch.Tensor:
        raise TypeError("the MPS framework doesn't support float64")

    def __array__(self, *args: Any, **options: Any) -> Any:
        raise TypeError("can't convert mps:0 device type tensor to numpy")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_drafters_read_comes_from_any_device(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """As speculative sampling, which reads probabilities at temperature 0, too."""
    params = SamplingParams(temperature=temperature)
    logits, tree = torch.randn(3, 50), TokenTree.chain(1, [2, 3])
    sampler = Sampler(params, [1, 2], 50, torch.from_numpy)
    choose, scores = sampler.choose, sampler.scores
    expected = Choices(logits, tree, sampler)
    probabilities, of_node = expected.probabilities([0, 2]), expected.log_distribution(1)
    monkeypatch.setattr(sampler, "choose", lambda rows, *args: choose(rows.cpu(), *args).as_subclass(OnMps))
    monkeypatch.setattr(sampler, "scores", lambda rows, *args: scores(rows.cpu(), *args).as_subclass(OnMps))
    found = Choices(logits.as_subclass(OnMps), tree, sampler)
    np.testing.assert_array_equal(found.probabilities([0, 2]), probabilities)
    np.testing.assert_array_equal(found.log_distribution(1), of_node)
    for mine, theirs in zip(found.top_k(3), expected.top_k(3), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    for mine, theirs in zip(found.log_probabilities([0], [4], 2), expected.log_probabilities([0], [4], 2), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_greedy_probabilities_of_several_nodes_take_one_call_of_the_processors() -> None:
    seen = []

    def noted(prefixes: Any, scores: Any) -> Any:
        seen.append(len(prefixes))
        return scores

    sampler = Sampler(SamplingParams(processors=(noted,)), [1, 2], VOCABULARY, torch.from_numpy)
    choices = Choices(torch.randn(4, VOCABULARY), TokenTree.from_paths(1, [[2], [3], [4]]), sampler)
    chosen = choices.probabilities([1, 2, 3]).argmax(axis=1)
    assert (seen, chosen.tolist()) == ([3], choices.of([1, 2, 3]).tolist())
