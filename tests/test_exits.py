"""LayerSkip: the first layers draft in the target's own cache, and what they have computed is not computed again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from architectures import ARCHITECTURES, BY_NAME, FAST, Architecture
from helpers import GREEDY, run
from test_layers import REFUSED, WITHOUT_PARTS

from leapahead import Engine, Request
from leapahead.core.errors import BadParameter, LeapaheadError, Refused
from leapahead.core.sampling import SamplingParams
from leapahead.core.stop import StopParams
from leapahead.core.tree import TokenTree
from leapahead.core.verify import Verdict, verify
from leapahead.drafters.draft_model import DraftModelDrafter
from leapahead.drafters.draft_runner import DraftRunner
from leapahead.engine.request import Handle
from leapahead.models.base import CHAIN, TREE, Capture, read_prompt
from leapahead.models.self_draft import early_exit
from leapahead.models.self_draft.early_exit import EarlyExit, Handed
from leapahead.models.transformers.forward import CachedState, MaskedExecutor
from leapahead.models.transformers.model import TransformersSession, TransformersTarget
from leapahead.planner.draft import Step

WARM = SamplingParams(temperature=1.0, seed=3)
LONG = StopParams(max_new_tokens=40)
TREES = [
    pytest.param(each, id=each.name, marks=() if each.name in FAST else pytest.mark.slow)
    for each in ARCHITECTURES
    if each.expect == "tree" and each.name not in {*REFUSED, *WITHOUT_PARTS}
]


def shallow(name: str = "llama", count: int = 4, **options: Any) -> Any:
    """A model whose last two layers add little, so that its first two draft well."""
    torch.manual_seed(0)
    model = replace(BY_NAME[name], options={**BY_NAME[name].options, "num_hidden_layers": count, **options}).build()
    with torch.no_grad():
        for layer in model.model.layers[2:]:
            layer.self_attn.o_proj.weight *= 0.1
            layer.mlp.down_proj.weight *= 0.1
    return model


@pytest.fixture(scope="module")
def target() -> TransformersTarget:
    return TransformersTarget(shallow())


def opened(target: TransformersTarget, prompt: Any, params: SamplingParams = GREEDY) -> TransformersSession:
    """A session whose prompt is read."""
    session = target.open(prompt, params)
    read_prompt(target, session)
    return session


def decode(engine: Engine, requests: list[Request]) -> list[Handle]:
    """Decodes them together, to their ends."""
    handles = [engine.submit(request) for request in requests]
    engine.run(handles)
    return handles


def drafted(runners: list[DraftRunner]) -> list[Any]:
    """The drafts of one draft forward."""
    with runners[0].target.lock:
        return DraftRunner.forward(runners)[0]


class Rows:
    """Counts the rows that pass the layers of a model's two halves and of the model itself."""

    def __init__(self, target: TransformersTarget, exit: EarlyExit) -> None:
        assert exit.halves is not None
        self.first = self.rest = self.whole = 0
        # Layers that are left out pass rows on, and are no work.
        self._watch(exit.halves.first.model.layers[0], "first")
        self._watch(exit.halves.rest.model.layers[-1], "rest")
        self._watch(target.model.model.layers[0], "whole")
        exit._made_of = exit.parts.objects()  # the count changes nothing

    def _watch(self, layer: Any, name: str) -> None:
        def count(module: Any, args: Any, kwargs: Any) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            setattr(self, name, getattr(self, name) + hidden.shape[0] * hidden.shape[1])

        layer.register_forward_pre_hook(count, with_kwargs=True)


# ----------------------------------------------------------------------------------------------------------- families


@pytest.mark.slow
@pytest.mark.parametrize("architecture", TREES)
def test_every_family_is_its_two_halves(architecture: Architecture) -> None:
    """Each is tested when it is made, with drafts that were begun in part."""
    exit = EarlyExit(TransformersTarget(architecture.build()), 1)
    assert exit.halves is not None
    assert exit.info.capabilities >= {CHAIN, TREE}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "deepseek_v3", "llama4"])
def test_texts_of_a_family_are_plain_decoding_s(name: str) -> None:
    """Two in a batch, drafted by the first layer, trees."""
    target = TransformersTarget(BY_NAME[name].build())
    prompts, stop = [range(20, 31), range(25, 29)], StopParams(max_new_tokens=10)
    plain = [run(target, prompt=prompt, params=WARM, stop=stop).tokens for prompt in prompts]
    engine = Engine(target)
    drafter = engine.drafter("draft_model", draft="self:first=1", nodes=5, depth=2)
    together = decode(engine, [Request(list(prompt), drafter, WARM, stop) for prompt in prompts])
    assert [each.tokens for each in together] == plain
    assert all(each.stats.drafted_by["draft"] > 0 for each in together)


@pytest.mark.slow
def test_a_model_that_takes_chains_only_keeps_a_cache_for_its_draft() -> None:
    chains = next(each for each in ARCHITECTURES if each.expect == "chain" and each.name not in REFUSED)
    target = TransformersTarget(chains.build())
    exit = EarlyExit(target, 1)
    assert exit.halves is None
    assert not exit.shares([1, 2])
    plain = run(target, prompt=range(20, 31), stop=LONG).tokens
    drafter = DraftModelDrafter("self:first=1", nodes=2, depth=2, chain=True)
    assert run(target, drafter, prompt=range(20, 31), stop=LONG).tokens == plain


def test_halves_that_are_not_the_model_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    right = early_exit.Halves.end

    def wrong(self: Any, batch: Any, hidden: torch.Tensor) -> torch.Tensor:
        return right(self, batch, hidden * 1.5)

    monkeypatch.setattr(early_exit.Halves, "end", wrong)
    with pytest.raises(Refused, match=r"first 2 layers and the layers behind them do not give the logits of"):
        EarlyExit(TransformersTarget(shallow()), 2)


# ---------------------------------------------------------------------------------------------------- the cache, shared


@pytest.mark.slow
@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("options", [{"nodes": 4, "depth": 4, "chain": True}, {"nodes": 12, "depth": 3}], ids=str)
def test_nothing_is_computed_twice(params: SamplingParams, options: dict[str, Any]) -> None:
    """Each node goes through the first layers once, through the others once; the prompt through neither half."""
    target = TransformersTarget(shallow())
    exit, engine = EarlyExit(target, 2), Engine(target)
    plain = run(target, prompt=range(3, 40), params=params, stop=LONG)
    drafter = engine.drafter("draft_model", draft=exit, **options)
    decode(engine, [Request([1, 2, 3], drafter, stop=LONG)])  # measures latencies, once
    target.forget()
    rows, prompt, steps = Rows(target, exit), 36, list[Step]()
    (text,) = decode(engine, [Request(list(range(3, 40)), drafter, params, LONG, on_step=steps.append)])
    assert text.tokens == plain.tokens
    stats = text.stats
    assert stats.acceptance_length > 1.5
    whole = sum(len(step.tree) for step in steps if len(step.tree) == 1 and not step.proposal.sources[1:])
    nodes = sum(len(step.tree) for step in steps) - whole
    assert rows.whole - prompt == whole
    assert rows.rest == nodes
    forwards = stats.drafter["draft"]["forwards"]
    assert forwards > len(steps)  # further draft forwards of a step build on earlier ones
    # A node that was computed and then not drafted is work lost; of those drafted none is computed twice.
    assert nodes <= rows.first <= nodes + forwards * 16


def test_chains_cost_each_half_a_row_a_node() -> None:
    """Where all that was computed is drafted, the count is exact."""
    target = TransformersTarget(shallow())
    exit = EarlyExit(target, 2)
    rows = Rows(target, exit)
    session = opened(target, list(range(3, 20)))
    runner = DraftRunner(exit, session.tokens)
    assert runner.opened
    assert runner.missing == 0
    whole = rows.whole
    tree = TokenTree.chain(19, [4, 5, 6])
    for depth in range(3):
        runner.add([tuple([4, 5, 6][:depth])])
        drafted([runner])
    assert rows.first == 3
    target.step([session], [tree])
    assert (rows.first, rows.rest, rows.whole) == (4, 4, whole)


@pytest.mark.parametrize("exclusive", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("sliding", [False, True], ids=["full", "sliding"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_any_part_of_any_tree_may_be_begun(seed: int, sliding: bool, exclusive: bool) -> None:
    """Random trees of a ragged batch, parts of them computed in random order, of some rows none; then commits."""
    kinds = ["sliding_attention", "full_attention"] * 2
    options = {"layer_types": kinds, "sliding_window": 6} if sliding else {}
    target = TransformersTarget(shallow("ministral" if sliding else "llama", **options).double(), exclusive=exclusive)
    exit = EarlyExit(target, 2)
    assert exit.halves is not None
    rng = np.random.default_rng(seed)
    texts = [[int(token) for token in rng.integers(3, 60, size=size)] for size in (9, 4, 14)]
    sessions = [opened(target, text) for text in texts]
    for _ in range(4):
        trees = [random_tree(rng, session.tokens[-1], int(rng.integers(1, 9))) for session in sessions]
        drafting = [i for i in range(3) if rng.random() < 0.8]
        runners = {i: DraftRunner(exit, sessions[i].tokens) for i in drafting}
        for _ in range(int(rng.integers(1, 4))):
            for i in drafting:  # of the tree itself, and a place that will not be in it
                nodes = rng.choice(len(trees[i]), size=min(2, len(trees[i])), replace=False)
                runners[i].add([tuple(trees[i].path_tokens(int(node))) for node in nodes] + [(61, 62)])
            if drafting:
                drafted([runners[i] for i in drafting])
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
        for i in drafting:
            runners[i].close()


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
    """A text that was given up between a draft forward and the step leaves a row behind that another text takes."""
    exit = EarlyExit(target, 2)
    first = opened(target, [5, 6, 7, 8])
    runner = DraftRunner(exit, first.tokens)
    runner.add([()])
    drafted([runner])
    first.close()
    second = opened(target, [5, 6, 9, 8])
    ours = target.step([second], [TokenTree.root(8)])[0].logits
    with torch.no_grad():
        wanted = target.model(input_ids=torch.tensor([[5, 6, 9, 8]])).logits[0, -1:]
    torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-4)
    second.close()


def test_a_draft_forward_that_was_interrupted_is_not_used(
    target: TransformersTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    exit = EarlyExit(target, 2)
    assert exit.halves is not None
    session = opened(target, [5, 6, 7, 8])
    runner = DraftRunner(exit, session.tokens)
    runner.add([()])
    drafted([runner])

    def interrupted(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    runner.add([(9,)])
    with monkeypatch.context() as patch:
        patch.setattr(exit.halves.first, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            drafted([runner])
    ours = target.step([session], [TokenTree.chain(8, [9])])[0].logits
    with torch.no_grad():
        wanted = target.model(input_ids=torch.tensor([[5, 6, 7, 8, 9]])).logits[0, -2:]
    torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-4)
    session.close()


def test_hidden_states_of_nodes_that_were_begun(target: TransformersTarget) -> None:
    exit = EarlyExit(target, 2)
    session = opened(target, [5, 6, 7, 8])
    runner = DraftRunner(exit, session.tokens)
    runner.add([()])
    drafted([runner])
    (choices,) = target.step([session], [TokenTree.chain(8, [9])], None, Capture(hidden=(1, 3)))
    with torch.no_grad():
        own = target.model(input_ids=torch.tensor([[5, 6, 7, 8, 9]]), output_hidden_states=True).hidden_states
    wanted = torch.cat([own[1][0, -2:], own[3][0, -2:]], dim=-1)
    torch.testing.assert_close(choices.hidden, wanted, rtol=1e-4, atol=1e-4)
    session.close()


def test_a_text_that_is_not_the_target_s_has_a_cache_of_its_own(target: TransformersTarget) -> None:
    """Latencies are measured so."""
    exit = EarlyExit(target, 2)
    session = opened(exit, [5, 6, 7, 8])
    ours = exit.step([session], [TokenTree.root(8)])[0].logits
    with torch.no_grad():
        wanted = exit.model(input_ids=torch.tensor([[5, 6, 7, 8]])).logits[0, -1:]
    torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-4)
    session.close()


def test_two_exits_are_refused(target: TransformersTarget) -> None:
    with pytest.raises(BadParameter, match="self:first=1 and self:first=2 would use the same"):
        Engine(target).drafter("draft_model", draft=["self:first=1", "self:first=2"])
    session = opened(target, [5, 6, 7, 8])
    one, other = (EarlyExit(target, count) for count in (1, 2))
    mine, theirs = (DraftRunner(exit, session.tokens) for exit in (one, other))
    for each in (mine, theirs):
        each.add([()])
        drafted([each])
    mine.add([(4,)])
    drafted([mine])
    assert "two early exits" in mine.failed
    assert not theirs.failed
    session.close()


def test_a_draft_that_is_lost_with_a_step_is_begun_anew(target: TransformersTarget) -> None:
    """As where the cache was full: the step changed nothing but the nodes of the exit, which were in its rows."""
    session = opened(target, [5, 6, 7, 8])
    runner = DraftRunner(EarlyExit(target, 2), session.tokens)
    runner.add([()])
    drafted([runner])
    assert isinstance(target.executor, MaskedExecutor)
    assert isinstance(session.state, CachedState)
    target.executor.discard([session.state.row])
    runner.add([(4,)])
    assert drafted([runner]) == [None]
    assert "begun anew" in runner.failed
    for _ in range(3):
        (choices,) = target.step([session], [TokenTree.root(session.tokens[-1])])
        session.commit(verify(TokenTree.root(session.tokens[-1]), choices))
    runner.add([()])
    assert drafted([runner]) != [None]
    assert not runner.failed
    session.close()


@pytest.mark.slow
def test_exits_in_turns_do_not_disturb_each_other(target: TransformersTarget) -> None:
    """One process may compare them: texts of a batch with an exit each."""
    prompts, engine = (range(3, 9), range(9, 20)), Engine(target)
    plain = [run(target, prompt=prompt, stop=LONG).tokens for prompt in prompts]
    exits = [engine.drafter("draft_model", draft=f"self:first={count}", nodes=6, depth=2) for count in (1, 2)]
    requests = [Request(list(prompt), each, stop=LONG) for prompt, each in zip(prompts, exits, strict=True)]
    assert [text.tokens for text in decode(engine, requests)] == plain


def test_penalties_reach_the_exit(target: TransformersTarget) -> None:
    """Its sampler has the live text: the rejection rule reads its processed probabilities."""
    exit = EarlyExit(target, 2)
    params = SamplingParams(temperature=1.0, repetition_penalty=1.7, seed=1)
    session = opened(target, [5, 6, 7, 8], params)
    runner = DraftRunner(exit, session.tokens, params)
    for _ in range(3):
        runner.add([()])
        (draft,) = drafted([runner])
        fresh = opened(exit, list(session.tokens), params)
        wanted = exit.step([fresh], [TokenTree.root(session.tokens[-1])])[0].probabilities([0])
        np.testing.assert_allclose(draft.choices.probabilities(draft.nodes), wanted, atol=1e-6)
        fresh.close()
        target.step([session], [TokenTree.root(session.tokens[-1])])
        session.commit(Verdict((0,), (11,), 0))
    session.close()


def test_an_exit_is_made_while_a_session_is_open() -> None:
    """What it is tested with stays out of the target's cache."""
    target = TransformersTarget(shallow())
    session = opened(target, [5, 6, 7])
    EarlyExit(target, 2)
    assert isinstance(target.executor, MaskedExecutor)
    assert [row.length for row in target.executor.cache.rows] == [2]
    session.close()


def test_more_layers_than_there_are_make_no_exit(target: TransformersTarget) -> None:
    assert TREE in EarlyExit(target, 2).info.capabilities
    with pytest.raises(LeapaheadError, match="self:first=9"):
        EarlyExit(target, 9)


def test_an_exit_of_a_model_whose_modules_were_replaced_is_refused() -> None:
    """Both halves hold the modules that the model had, so a text would be wrong where they verified it."""
    target = TransformersTarget(shallow())
    engine = Engine(target)
    exit = engine.drafter("draft_model", draft="self:first=2", nodes=6, depth=2)
    request = Request([3, 1, 4], exit, GREEDY, LONG)
    assert decode(engine, [request])[0].stats.accepted > 0
    old = target.model.model.layers[3].mlp.down_proj
    target.model.model.layers[3].mlp.down_proj = torch.nn.Linear(old.in_features, old.out_features, bias=False)
    with pytest.raises(LeapaheadError, match="modules of the model were replaced"):
        decode(engine, [request])


def test_an_exit_of_a_model_whose_weights_were_replaced_is_refused() -> None:
    """As by `load_state_dict(..., assign=True)`; what is written into them is seen by the halves, too."""
    target = TransformersTarget(shallow())
    engine = Engine(target)
    exit = engine.drafter("draft_model", draft="self:first=2", nodes=6, depth=2)
    request = Request([3, 1, 4], exit, GREEDY, StopParams(max_new_tokens=8))
    layer = target.model.model.layers[3].mlp.down_proj
    with torch.no_grad():
        layer.weight.mul_(2)
    plain = Request([3, 1, 4], engine.drafter("plain"), GREEDY, StopParams(max_new_tokens=8))
    assert decode(engine, [request])[0].tokens == decode(engine, [plain])[0].tokens
    old = layer.weight
    layer.weight = torch.nn.Parameter(-old.detach())
    with pytest.raises(LeapaheadError, match="weights or hooks of the model were replaced, or its adapters switched"):
        decode(engine, [request])
    layer.weight = old
    assert decode(engine, [request])[0].tokens == decode(engine, [plain])[0].tokens


def test_an_exit_of_a_model_with_other_hooks_is_refused() -> None:
    """As of activation steering. The halves have those that the model had."""
    target = TransformersTarget(shallow())
    engine = Engine(target)
    exit = engine.drafter("draft_model", draft="self:first=2", nodes=6, depth=2)
    request = Request([3, 1, 4], exit, GREEDY, StopParams(max_new_tokens=8))
    text = decode(engine, [request])[0].tokens
    hook = target.model.model.layers[3].register_forward_hook(lambda module, args, output: output.roll(1, -1))
    with pytest.raises(LeapaheadError, match="weights or hooks of the model were replaced"):
        decode(engine, [request])
    hook.remove()
    assert decode(engine, [request])[0].tokens == text


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
def test_an_exit_of_a_model_whose_adapters_were_switched_is_refused() -> None:
    peft = pytest.importorskip("peft")
    model = shallow()
    settings = peft.LoraConfig(r=2, target_modules=["down_proj"], init_lora_weights=False)
    for name in "ab":
        peft.inject_adapter_in_model(settings, model, name)
    tuned = [part for part in model.modules() if hasattr(part, "lora_A")]
    engine = Engine(TransformersTarget(model.eval()))
    exit = engine.drafter("draft_model", draft="self:first=2", nodes=6, depth=2)
    request, plain = (
        Request([3, 1, 4], each, GREEDY, StopParams(max_new_tokens=8)) for each in (exit, engine.drafter("plain"))
    )
    assert decode(engine, [request])[0].tokens == decode(engine, [plain])[0].tokens
    for part in tuned:
        part.set_adapter("a" if part.active_adapters == ["b"] else "b")
    with pytest.raises(LeapaheadError, match="or its adapters switched, since"):
        decode(engine, [request])
