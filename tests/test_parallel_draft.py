"""Draft models with mask tokens (PARD): one forward gives candidates of several depths, and no text changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from helpers import FixedLatency

from leapahead import LLM
from leapahead.core.errors import BadParameter
from leapahead.drafters.sources.draft import MASKED, ParallelDraftSource

pytestmark = pytest.mark.filterwarnings("ignore:the draft model")  # which may take as long as the tiny model

MASK = 3
PROMPTS = [[5, 9, 30, 41, 5, 9], [7, 8], [60, 61, 62, 63]]


def pair(dtype: torch.dtype = torch.float32, mask: int = MASK) -> tuple[Any, Any]:
    """A target, and a draft model with the same weights but for a disturbance, whose config.json names a mask token."""
    from training_parts import model_of

    target, draft = model_of().to(dtype), model_of().to(dtype)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for each in draft.parameters():
            each.add_(0.05 * torch.randn_like(each))
    draft.config.pard_token = mask
    return target, draft


class Kept(NamedTuple):
    """Candidates after a path: below `computed`, with so many masks between."""

    tokens: tuple[int, ...]
    computed: tuple[int, ...]
    masks: int
    candidates: dict[int, float]


def recording(monkeypatch: pytest.MonkeyPatch) -> list[Kept]:
    found: list[Kept] = []
    keep = ParallelDraftSource.keep

    def recorded(self: ParallelDraftSource, keys: Sequence[Any], rows: Any, which: Any = None) -> None:
        keep(self, keys, rows, which)
        for path, masks in keys:
            tokens, logp, _ = self._rows[path, masks]
            candidates = dict(zip(tokens.tolist(), logp.tolist(), strict=True))
            found.append(Kept(tuple(self._sequence.tokens), path, masks, candidates))

    monkeypatch.setattr(ParallelDraftSource, "keep", recorded)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("options", [{"nodes": 12}, {"nodes": 20, "depth": 2}, {}, {"nodes": 6, "chain": True}])
def test_candidates_are_those_of_a_full_recomputation(
    options: dict[str, Any], temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = pair(torch.float64)
    found = recording(monkeypatch)
    given: dict[str, Any] = {"max_new_tokens": 20, "temperature": temperature, "seed": 3}
    plain = LLM(target, drafter="plain").generate(PROMPTS, **given)
    texts = LLM(target, drafter="draft_model", draft=draft, max_batch=4, **options).generate(PROMPTS, **given)
    assert [text.tokens for text in texts] == [text.tokens for text in plain]
    if options:
        assert max(text.stats.accepted for text in texts) > 0
        assert {each.masks for each in found} == set(range(MASKED))
    with torch.no_grad():
        for tokens, path, masks, candidates in found[::7]:
            row = draft(torch.tensor([[*tokens, *path, *[MASK] * masks]])).logits[0, -1].log_softmax(-1).numpy()
            assert np.abs(row[list(candidates)] - np.array([*candidates.values()])).max() < 1e-6


def test_one_forward_drafts_a_whole_chain() -> None:
    target, draft = pair()
    llm = LLM(target, drafter="draft_model", draft=draft, nodes=MASKED, depth=1, chain=True)
    stats = llm.generate(PROMPTS[0], max_new_tokens=20).stats
    assert stats.drafter["draft"]["forwards"] <= stats.steps
    assert stats.nodes_per_step > 4
    del draft.config.pard_token
    with pytest.raises(BadParameter, match="the draft forwards add 1 nodes to a chain"):
        LLM(target, drafter="draft_model", draft=draft, nodes=MASKED, depth=1, chain=True)


def test_a_forward_that_costs_little_is_run() -> None:
    target, draft = pair()
    llm = LLM(target, draft=draft)
    (model,) = (drafter := llm.engine.drafter("draft_model", draft=draft)).draft_forwards.models  # type: ignore[attr-defined]
    model.__dict__["latency"] = FixedLatency(model.target, {1: 1e-6, 64: 2e-6})
    assert drafter is not None
    assert llm.generate(PROMPTS[0], max_new_tokens=20).tokens


def test_a_mask_outside_the_vocabulary_is_refused() -> None:
    target, draft = pair(mask=64)
    with pytest.raises(BadParameter, match="has pard_token=64 in its config"):
        LLM(target, draft=draft)
