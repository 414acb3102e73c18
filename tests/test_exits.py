"""LayerSkip: the first layers draft in the target's own cache, and what they have computed is not computed again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from architectures import ARCHITECTURES, BY_NAME, Architecture
from helpers import GREEDY, begin, run
from test_layers import REFUSED, TOKEN_BY_TOKEN

from leapahead.core.errors import BadParameter, LeapaheadError, Refused
from leapahead.core.sampling import SamplingParams
from leapahead.core.stop import StopParams
from leapahead.core.tree import TokenTree
from leapahead.core.verify import Verdict
from leapahead.drafters import draft_models
from leapahead.drafters.draft_runner import Following
from leapahead.drafters.single import DraftModel
from leapahead.engine.loop import decode
from leapahead.models.base import CHAIN, TREE
from leapahead.models.self_draft import early_exit
from leapahead.models.self_draft.early_exit import EarlyExit, Handed
from leapahead.models.self_draft.layer_skip import sub_layers
from leapahead.models.transformers.forward import MaskedEngine
from leapahead.models.transformers.model import TransformersTarget

WARM = SamplingParams(temperature=1.0, seed=3)
LONG = StopParams(max_new_tokens=40)
TREES = [each for each in ARCHITECTURES if each.expect == "tree" and each.name not in {*REFUSED, *TOKEN_BY_TOKEN}]


def shallow(name: str = "llama", count: int = 4, **options: Any) -> Any:
    """A model whose last two layers add little, so that its first two draft well."""
    torch.manual_seed(0)
    model = replace(BY_NAME[name], options={**BY_NAME[name].options, "num_hidden_layers": count, **options}).build()
    with torch.no_grad():
        for layer in sub_layers(TransformersTarget(model))._model.model.layers[2:]:
            layer.self_attn.o_proj.weight *= 0.1
            layer.mlp.down_proj.weight *= 0.1
    return model


@pytest.fixture(scope="module")
def target() -> TransformersTarget:
    return TransformersTarget(shallow())


class Rows:
    """Counts the rows that pass the layers of a model's two halves and of the model itself."""

    def __init__(self, target: TransformersTarget, exit: EarlyExit) -> None:
        assert exit.halves is not None
        self.first = self.rest = self.whole = 0
        # Layers that are left out pass rows on, and are no work.
        self._watch(exit.halves.first.model.layers[0], "first")
        self._watch(exit.halves.rest.model.layers[-1], "rest")
        self._watch(target.model.model.layers[0], "whole")

    def _watch(self, layer: Any, name: str) -> None:
        def count(module: Any, args: Any, kwargs: Any) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            setattr(self, name, getattr(self, name) + hidden.shape[0] * hidden.shape[1])

        layer.register_forward_pre_hook(count, with_kwargs=True)


# ----------------------------------------------------------------------------------------------------------- families


@pytest.mark.parametrize("architecture", TREES, ids=lambda each: each.name)
def test_every_family_is_its_two_halves(architecture: Architecture) -> None:
    """Each is tested when it is made, with drafts that were begun in part."""
    exit = EarlyExit(TransformersTarget(architecture.build()), 1)
    assert exit.halves is not None
    assert exit.capabilities >= {CHAIN, TREE}


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "gptj", "mixtral", "deepseek_v3", "gpt_oss", "llama4"])
def test_texts_of_a_family_are_plain_decoding_s(name: str) -> None:
    """Two in a batch, drafted by the first layer, trees."""
    target = TransformersTarget(BY_NAME[name].build())
    prompts = [range(20, 31), range(25, 29)]
    plain = [run(target, prompt=prompt, params=WARM, stop=StopParams(max_new_tokens=10)).tokens for prompt in prompts]
    together = [
        begin(
            target,
            DraftModel("self:first=1", nodes=5, depth=2),
            prompt,
            params=WARM,
            stop=StopParams(max_new_tokens=10),
        )
        for prompt in prompts
    ]
    batch = list(together)
    for _ in decode(target, batch):
        pass
    assert [each.session.tokens[-10:] for each in together] == plain
    assert all(each.stats.drafted_by["draft"] > 0 for each in together)


def test_a_model_that_takes_chains_only_keeps_a_cache_for_its_draft() -> None:
    chains = next(each for each in ARCHITECTURES if each.expect == "chain" and each.name not in REFUSED)
    target = TransformersTarget(chains.build())
    exit = EarlyExit(target, 1)
    assert exit.halves is None
    assert not exit.shares([1, 2])
    plain = run(target, prompt=range(20, 31), stop=LONG).tokens
    assert (
        run(target, DraftModel("self:first=1", nodes=4, depth=2, chain=True), prompt=range(20, 31), stop=LONG).tokens
        == plain
    )


def test_halves_that_are_not_the_model_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    right = early_exit.Halves.end

    def wrong(self: Any, batch: Any, hidden: torch.Tensor) -> torch.Tensor:
        return right(self, batch, hidden * 1.5)

    monkeypatch.setattr(early_exit.Halves, "end", wrong)
    with pytest.raises(Refused, match=r"first 2 layers and the layers behind them do not give the logits of"):
        EarlyExit(TransformersTarget(shallow()), 2)


# ---------------------------------------------------------------------------------------------------- the cache, shared


@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("options", [{"nodes": 4, "depth": 4, "chain": True}, {"nodes": 12, "depth": 3}], ids=str)
def test_nothing_is_computed_twice(params: SamplingParams, options: dict[str, Any]) -> None:
    """Each node goes through the first layers once, through the others once; the prompt through neither half."""
    target = TransformersTarget(shallow())
    exit = draft_models.own(target, "self:first=2").target
    assert isinstance(exit, EarlyExit)
    plain = run(target, prompt=range(3, 40), params=params, stop=LONG)
    run(target, DraftModel("self:first=2", **options), stop=LONG)  # measures costs, once
    target.forget()
    rows, prompt = Rows(target, exit), 36
    text = run(target, DraftModel("self:first=2", **options), prompt=range(3, 40), params=params, stop=LONG)
    assert text.tokens == plain.tokens
    stats = text.generation.stats
    assert stats.acceptance_length > 1.5
    whole = sum(len(step.tree) for step in text.steps if len(step.tree) == 1 and not step.proposal.sources[1:])
    drafted = sum(len(step.tree) for step in text.steps) - whole
    assert rows.whole - prompt == whole
    assert rows.rest == drafted
    looked = stats.drafter["draft"]["forwards"]
    assert looked > len(text.steps)  # further looks of a step stand on earlier ones
    # A place that was looked at and then not drafted is work lost; of those drafted none is done twice.
    assert drafted <= rows.first <= drafted + looked * 16


def test_chains_cost_each_half_a_row_a_node() -> None:
    """Where all that was looked at is drafted, the count is exact."""
    target = TransformersTarget(shallow())
    exit = draft_models.own(target, "self:first=2").target
    assert isinstance(exit, EarlyExit)
    rows = Rows(target, exit)
    session = target.open(list(range(3, 20)), GREEDY)
    followed = Following(exit, session.tokens)
    assert followed.opened
    assert followed.missed == 0
    whole = rows.whole
    tree = TokenTree.chain(19, [4, 5, 6])
    for depth in range(3):
        followed.add([tuple([4, 5, 6][:depth])])
        Following.look([followed])
    assert rows.first == 3
    target.step([session], [tree])
    assert (rows.first, rows.rest, rows.whole) == (4, 4, whole)


@pytest.mark.parametrize("sliding", [False, True], ids=["full", "sliding"])
@pytest.mark.parametrize("seed", range(6))
def test_any_part_of_any_tree_may_be_begun(seed: int, sliding: bool) -> None:
    """Random trees of a ragged batch, parts of them looked at in random order, some rows not at all; then commits."""
    kinds = ["sliding_attention", "full_attention"] * 2
    options = {"layer_types": kinds, "sliding_window": 6} if sliding else {}
    target = TransformersTarget(shallow("ministral" if sliding else "llama", **options).double())
    exit = EarlyExit(target, 2)
    assert exit.halves is not None
    rng = np.random.default_rng(seed)
    texts = [[int(token) for token in rng.integers(3, 60, size=size)] for size in (9, 4, 14)]
    sessions = [target.open(text, GREEDY) for text in texts]
    for _ in range(4):
        trees = [random_tree(rng, session.tokens[-1], int(rng.integers(1, 9))) for session in sessions]
        looking = [i for i in range(3) if rng.random() < 0.8]
        followed = {i: Following(exit, sessions[i].tokens) for i in looking}
        for _ in range(int(rng.integers(1, 4))):
            for i in looking:  # of the tree itself, and a place that will not be in it
                nodes = rng.choice(len(trees[i]), size=min(2, len(trees[i])), replace=False)
                followed[i].add([tuple(trees[i].path_tokens(int(node))) for node in nodes] + [(61, 62)])
            Following.look([followed[i] for i in looking])
        found = target.step(sessions, trees)
        for session, tree, choices in zip(sessions, trees, found, strict=True):
            for node in range(len(tree)):
                whole = np.array([[*session.tokens, *tree.path_tokens(node)]])
                with torch.no_grad():
                    wanted = target.model(input_ids=torch.from_numpy(whole), use_cache=False).logits[0, -1]
                torch.testing.assert_close(choices.logits[node], wanted, rtol=1e-9, atol=1e-9)
            node = int(rng.integers(len(tree)))
            path = [node]
            while path[0]:
                path.insert(0, int(tree.parents[path[0]]))
            tokens = (*tree.path_tokens(node), int(rng.integers(3, 60)))
            session.commit(Verdict(tuple(path), tokens, len(path) - 1))
        for i in looking:
            followed[i].close()


def random_tree(rng: np.random.Generator, root: int, nodes: int) -> TokenTree:
    parents = [-1] + [int(rng.integers(node)) for node in range(1, nodes)]
    return TokenTree(np.array([root, *rng.choice(np.arange(3, 60), size=nodes - 1, replace=False)]), np.array(parents))


def test_what_was_begun_is_handed_over_in_any_order() -> None:
    tree = TokenTree(np.array([9, 1, 2, 3, 4]), np.array([-1, 0, 0, 1, 2]))
    begun = TokenTree(np.array([9, 7, 2, 4]), np.array([-1, 0, 0, 2]))
    handed = Handed.of(tree, begun)
    assert handed.slots == [0, 2, 3]
    assert handed.tree == TokenTree(np.array([9, 2, 4, 1, 3]), np.array([-1, 0, 1, 0, 3]))
    assert [int(handed.tree.tokens[place]) for place in handed.place] == tree.tokens.tolist()
    assert Handed.of(tree, None).slots == []
    assert Handed.of(tree, None).tree == tree


def test_what_was_begun_of_an_earlier_text_is_not_used(target: TransformersTarget) -> None:
    """A text that was given up between a look and the step leaves a row behind that another text takes."""
    exit = EarlyExit(target, 2)
    first = target.open([5, 6, 7, 8], GREEDY)
    followed = Following(exit, first.tokens)
    followed.add([()])
    Following.look([followed])
    first.close()
    second = target.open([5, 6, 9, 8], GREEDY)
    ours = target.step([second], [TokenTree.root(8)])[0].logits
    with torch.no_grad():
        wanted = target.model(input_ids=torch.tensor([[5, 6, 9, 8]])).logits[0, -1:]
    torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-4)
    second.close()


def test_a_text_that_is_not_the_target_s_has_a_cache_of_its_own(target: TransformersTarget) -> None:
    """Costs are measured so."""
    exit = EarlyExit(target, 2)
    session = exit.open([5, 6, 7, 8], GREEDY)
    ours = exit.step([session], [TokenTree.root(8)])[0].logits
    with torch.no_grad():
        wanted = exit.model(input_ids=torch.tensor([[5, 6, 7, 8]])).logits[0, -1:]
    torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-4)
    session.close()


def test_two_exits_are_refused(target: TransformersTarget) -> None:
    with pytest.raises(BadParameter, match="self:first=1 and self:first=2 would share"):
        DraftModel(["self:first=1", "self:first=2"]).fits(target)
    session = target.open([5, 6, 7, 8], GREEDY)
    one, other = (EarlyExit(target, count) for count in (1, 2))
    mine, theirs = (Following(exit, session.tokens) for exit in (one, other))
    for each in (mine, theirs):
        each.add([()])
        Following.look([each])
    mine.add([(4,)])
    Following.look([mine])
    assert "two early exits" in mine.failed
    assert not theirs.failed
    session.close()


def test_exits_in_turns_do_not_disturb_each_other(target: TransformersTarget) -> None:
    """One process may compare them: texts of a batch with an exit each."""
    plain = [run(target, prompt=prompt, stop=LONG).tokens for prompt in (range(3, 9), range(9, 20))]
    batch = [
        begin(target, DraftModel(f"self:first={count}", nodes=6, depth=2), prompt, stop=LONG)
        for count, prompt in ((1, range(3, 9)), (2, range(9, 20)))
    ]
    texts = list(batch)
    for _ in decode(target, batch):
        pass
    assert [text.session.tokens[-40:] for text in texts] == plain


def test_penalties_reach_the_exit(target: TransformersTarget) -> None:
    """Its sampler sees the live text: the rejection rule asks it for processed probabilities."""
    exit = EarlyExit(target, 2)
    params = SamplingParams(temperature=1.0, repetition_penalty=1.7, seed=1)
    session = target.open([5, 6, 7, 8], params)
    followed = Following(exit, session.tokens, params)
    for _ in range(3):
        followed.add([()])
        look = Following.look([followed])[0][0]
        assert look is not None
        fresh = exit.open(list(session.tokens), params)
        wanted = exit.step([fresh], [TokenTree.root(session.tokens[-1])])[0].probabilities([0])
        np.testing.assert_allclose(look.choices.probabilities(look.nodes), wanted, atol=1e-6)
        fresh.close()
        target.step([session], [TokenTree.root(session.tokens[-1])])
        session.commit(Verdict((0,), (11,), 0))
    session.close()


def test_an_exit_fits_a_batch_of_one() -> None:
    """Made while the only session that there may be is open; what it is tested with stays out of the cache."""
    target = TransformersTarget(shallow(), max_batch=1)
    plain = run(target, prompt=range(3, 20), stop=LONG).tokens
    session = target.open([5, 6, 7], GREEDY)
    EarlyExit(target, 2)
    assert [row.length for row in target.engine.cache.rows] == [2]
    session.close()
    assert run(target, DraftModel("self:first=2", nodes=6, depth=2), prompt=range(3, 20), stop=LONG).tokens == plain


def test_more_layers_than_there_are_make_no_exit(target: TransformersTarget) -> None:
    assert isinstance(target.engine, MaskedEngine)
    assert TREE in EarlyExit(target, 2).capabilities
    with pytest.raises(LeapaheadError, match="layers=9"):
        EarlyExit(target, 9)
