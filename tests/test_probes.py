"""Probes (PaSS, SPACE): what they compute beside trees and caches, what they refuse, and that no text changes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from helpers import FixedLatency, Scripted, run

from leapahead import LLM
from leapahead.core.errors import BadParameter, DraftError, LeapaheadError, Refused
from leapahead.core.tree import Probes, TokenTree
from leapahead.core.verify import Verdict, verify
from leapahead.drafters.head import HeadDrafter
from leapahead.drafters.heads import checkpoint
from leapahead.drafters.probe_groups import Worth, endings
from leapahead.drafters.sources.probes import ProbeSource
from leapahead.engine import loop
from leapahead.models.transformers.forward import CachedState
from leapahead.models.transformers.model import TransformersTarget
from leapahead.models.transformers.static.graphs import Calls
from leapahead.planner.draft import SequenceView, Step

PROMPTS = ["def add(a, b):\n    return a + b\n\ndef add(", "for number in range(10): print(", "The quick"]
KINDS = ("pass", "space")
DEPTHS = 3
SLOW = pytest.mark.slow


def embeddings_of(kind: str, model: Any, depths: int = DEPTHS) -> torch.Tensor:
    """Random ones, as large as those of tokens."""
    random = torch.Generator().manual_seed(3)
    own = model.get_input_embeddings().weight
    return torch.randn(1 if kind == "space" else depths, own.shape[1], generator=random) * own.detach().float().std()


def write(folder: Path, kind: str, model: Any, depths: int = DEPTHS, **changes: Any) -> Path:
    config = {"leapahead_probes": kind, "num_probes": depths, "vocab_size": model.config.vocab_size, **changes}
    checkpoint.write(folder, config, {"embeddings.weight": embeddings_of(kind, model, depths)})
    return folder


# ------------------------------------------------------------------------------------------------------- the tree


def test_probes_are_no_part_of_the_draft() -> None:
    tree = TokenTree([5, 6, 7, 8], [-1, 0, 0, 1])
    probed = tree.with_probes([Probes(1, (90, 91)), Probes(0, (90,))])
    assert (len(probed), probed.num_leaves, probed.leaf_list) == (4, 2, [2, 3])
    assert probed != tree
    assert probed.with_probes(()) == tree
    assert tree.computed is tree
    assert probed.computed == TokenTree([5, 6, 7, 8, 90, 91, 90], [-1, 0, 0, 1, 1, 4, 0])
    assert probed.computed.depth_list == [0, 1, 1, 2, 2, 3, 1]
    assert not probed.computed.ancestor_mask[:4, 4:].any()  # no node sees a probe
    for probes in (Probes(4, (90,)), Probes(-1, (90,)), Probes(0, ())):
        with pytest.raises(DraftError, match="probes must be below one of 4 nodes"):
            tree.with_probes([probes])


def test_where_the_path_ends() -> None:
    tree = TokenTree([1, 2, 3, 4], [-1, 0, 0, 1])
    assert endings(tree, [1.0, 0.5, 0.2, 0.4]) == pytest.approx([0.3, 0.1, 0.2, 0.4])
    assert endings(TokenTree.root(1), [1.0]) == [1.0]


def test_what_a_group_brings_is_learned() -> None:
    worth = Worth()
    for _ in range(200):
        worth.observe(2)
    assert float(worth) == pytest.approx(2, abs=0.2)
    for _ in range(200):
        worth.observe(0)
    assert float(worth) < 0.1


# ------------------------------------------------------------------------------------------------ what is computed


class Computed(NamedTuple):
    """Candidates that probes gave during decoding, by depth: of the text with `tokens`."""

    tokens: tuple[int, ...]
    candidates: list[dict[int, float]]


def recording(monkeypatch: pytest.MonkeyPatch) -> list[Computed]:
    found: list[Computed] = []
    observe = ProbeSource.observe

    def recorded(self: ProbeSource, sequence: SequenceView, step: Step) -> None:
        observe(self, sequence, step)
        if self._rows:
            rows = [
                {each.token: each.logp for each in self.candidates((0,) * depth, 1 << 20)}
                for depth in range(len(self._rows))
            ]
            found.append(Computed(tuple(sequence.tokens), rows))

    monkeypatch.setattr(ProbeSource, "observe", recorded)
    return found


@torch.no_grad()
def worst(found: list[Computed], model: Any, kind: str) -> float:
    """The greatest difference from one forward over the text and the probes behind it, without cache and tree."""
    rows = embeddings_of(kind, model).to(model.dtype)
    errors = []
    for tokens, candidates in found:
        count = len(candidates)
        probes = rows[:count] if kind == "pass" else rows.expand(count, -1)
        own = model.get_input_embeddings()(torch.tensor(tokens[:-1]))  # the probes do not see the newest token
        logits = model(inputs_embeds=torch.cat((own, probes))[None]).logits[0, -count:].double()
        for row, given in zip(logits, candidates, strict=True):
            values = row[list(given)]
            values = (values - values.logsumexp(0)).numpy()
            errors.append(np.abs(values - np.array([*given.values()])).max())
            assert set(row.topk(len(given)).indices.tolist()) == set(given)
    return float(max(errors))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, pytest.param(1.0, marks=SLOW)])
def test_candidates_are_those_of_a_full_recomputation(
    kind: str, temperature: float, exact_model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path, kind, exact_model)
    found = recording(monkeypatch)
    given: dict[str, Any] = {"max_new_tokens": 24, "temperature": temperature, "seed": 5, "ignore_eos": True}
    plain = LLM(exact_model, tokenizer=tokenizer, drafter="plain").generate(PROMPTS, **given)
    texts = LLM(exact_model, tokenizer=tokenizer, head=folder, nodes=24).generate(PROMPTS, **given)
    assert [text.tokens for text in texts] == [text.tokens for text in plain]
    assert max(text.stats.accepted for text in texts) > 4  # groups below drafted nodes gave candidates too
    assert {len(each.candidates) for each in found} > {3}  # shorter where the text ends
    assert worst(found, exact_model, kind) < 1e-6


def wrong_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: Any = TokenTree.__dict__["computed"].func

    def mutated(self: TokenTree) -> TokenTree:
        tree = computed(self)
        if tree is self:
            return tree
        depths = [depth + (node >= len(self)) for node, depth in enumerate(tree.depth_list)]
        return TokenTree.of_lists(tree.token_list, tree.parent_list, depths)

    monkeypatch.setattr(TokenTree, "computed", property(mutated))


def no_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probes of a group do not see one another."""
    computed: Any = TokenTree.__dict__["computed"].func

    def mutated(self: TokenTree) -> TokenTree:
        tree = computed(self)
        if tree is self:
            return tree
        parents = [*self.parent_list, *(node for node, ids in self.probes for _ in ids)]
        return TokenTree.of_lists(tree.token_list, parents, tree.depth_list)

    monkeypatch.setattr(TokenTree, "computed", property(mutated))


def group_of_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    observe = ProbeSource.observe

    def mutated(self: ProbeSource, sequence: SequenceView, step: Step) -> None:
        observe(self, sequence, step._replace(verdict=Verdict((0,), step.verdict.tokens[:1], 0)))

    monkeypatch.setattr(ProbeSource, "observe", mutated)


@pytest.mark.slow
@pytest.mark.parametrize("mutation", [wrong_positions, no_chains, group_of_the_root])
def test_wrong_rows_are_found(
    mutation: Callable[[pytest.MonkeyPatch], None],
    exact_model: Any,
    tokenizer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = write(tmp_path, "pass", exact_model)
    mutation(monkeypatch)
    found = recording(monkeypatch)
    LLM(exact_model, tokenizer=tokenizer, head=folder, nodes=24).generate(PROMPTS, max_new_tokens=24, ignore_eos=True)
    with pytest.raises(AssertionError):
        assert worst(found, exact_model, "pass") < 1e-3


def accepted_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first probe below the end of the path is committed, with the token that the target chose behind it."""

    def mutated(tree: TokenTree, chosen: Any) -> Verdict:
        found = verify(tree, chosen)
        row = len(tree)
        for (node, ids), rows in zip(tree.probes, chosen.probes, strict=True):
            if node == found.path[-1]:
                token = int(rows.top_k(1)[0][0, 0])
                return Verdict((*found.path, row), (*found.tokens, token), found.accepted)
            row += len(ids)
        return found

    monkeypatch.setattr(loop, "verify", mutated)


def kept_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry of the path's last node is replaced by that of the first probe."""
    commit = CachedState.commit

    def mutated(self: CachedState, path: Any) -> None:
        last = self.row.pending - 1
        commit(self, (*path[:-1], last) if len(path) < last else path)

    monkeypatch.setattr(CachedState, "commit", mutated)


@pytest.mark.slow
@pytest.mark.parametrize("mutation", [accepted_probe, kept_row])
def test_an_accepted_probe_is_found(
    mutation: Callable[[pytest.MonkeyPatch], None],
    tiny_model: Any,
    tokenizer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True}
    plain = LLM(tiny_model, tokenizer=tokenizer, drafter="plain").generate(PROMPTS, **given)
    llm = LLM(tiny_model, tokenizer=tokenizer, drafter="head", head=write(tmp_path, "pass", tiny_model), nodes=4)
    mutation(monkeypatch)
    with suppress(ValueError):  # the path has nodes that the draft does not have
        found = llm.generate(PROMPTS, **given)
        assert [text.tokens for text in found] != [text.tokens for text in plain]


# ------------------------------------------------------------------------------------------------------- the text


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"drafter": "head", "nodes": 6}, id="nodes"),
        pytest.param({"drafter": "head", "nodes": 4, "chain": True}, id="chain", marks=SLOW),
        pytest.param({"drafter": "head"}, id="planned", marks=SLOW),
        pytest.param({"nodes": 12}, id="auto"),
        pytest.param({"nodes": 6, "seed_aware": False}, id="unaware", marks=SLOW),
    ],
)
@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=SLOW), 0.8])
def test_no_text_changes(
    kind: str, options: dict[str, Any], temperature: float, tiny_model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    folder = write(tmp_path, kind, tiny_model)
    given: dict[str, Any] = {"max_new_tokens": 20, "temperature": temperature, "seed": 3, "n": 2}
    with LLM(tiny_model, tokenizer=tokenizer, drafter="plain") as llm:
        plain = llm.generate(PROMPTS, **given)
    with LLM(tiny_model, tokenizer=tokenizer, head=folder, max_batch=4, **options) as llm:
        found = llm.generate(PROMPTS, **given)
        (one,) = llm.generate(PROMPTS[0], **{**given, "n": 1})
    assert [[text.tokens for text in some] for some in found] == [[text.tokens for text in some] for some in plain]
    assert one.tokens == plain[0][0].tokens
    if "nodes" in options:
        assert one.stats.drafter[kind]["groups"] > 0
        assert one.stats.drafted_by[kind] > 0 or options.get("drafter") != "head"


@pytest.mark.parametrize("kind", ["pass", pytest.param("space", marks=SLOW)])
def test_no_text_changes_where_forwards_are_captured(
    kind: str, exact_model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    """Those with probes are not: the ids of probes are above the vocabulary, and captured forwards take ids."""
    folder = write(tmp_path, kind, exact_model)
    given: dict[str, Any] = {"max_new_tokens": 16, "ignore_eos": True}
    plain = LLM(exact_model, tokenizer=tokenizer, drafter="plain").generate(PROMPTS[0], **given)
    target = TransformersTarget(exact_model, static=Calls())
    found = LLM(target, tokenizer=tokenizer, head=folder, nodes=12).generate(PROMPTS[0], **given)
    assert found.tokens == plain.tokens
    assert found.stats.accepted > 0
    assert found.stats.drafter[kind]["groups"] > 0


def test_rows_count_as_cost_and_not_as_draft(tiny_model: Any, tokenizer: Any, tmp_path: Path) -> None:
    llm = LLM(tiny_model, tokenizer=tokenizer, drafter="head", head=write(tmp_path, "pass", tiny_model), nodes=4)
    drafter = llm.engine.drafter("head", head=str(tmp_path), nodes=4)
    steps: list[Step] = []
    ((request, _),) = llm.requests([[5, 6, 7]], {"max_new_tokens": 16, "ignore_eos": True})
    request = request.__class__(**{**request.__dict__, "drafter": drafter, "on_step": steps.append})
    handle = llm.engine.submit(request)
    llm.engine.run([handle])
    rows = [sum(len(each.tokens) for each in step.tree.probes) for step in steps]
    assert all(step.forward.cost.rows == len(step.tree) + some for step, some in zip(steps, rows, strict=True))
    assert handle.stats.nodes == sum(len(step.tree) for step in steps)
    assert handle.stats.drafted == handle.stats.nodes - len(steps) == sum(handle.stats.drafted_by.values())
    assert handle.stats.drafter["pass"]["rows"] == sum(rows[:-1])  # of the last step nothing is read
    deepest = [max(each.depth_list) for each in (step.tree.computed for step in steps)]
    assert all(len(step.tokens) <= deep + 1 for step, deep in zip(steps, deepest, strict=True))


def test_the_beginning_of_a_prompt_is_not_read_again(
    exact_model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No entry of a probe is among those that another text takes over."""
    folder = write(tmp_path, "pass", exact_model)
    found = recording(monkeypatch)
    llm = LLM(exact_model, tokenizer=tokenizer, drafter="head", head=folder, nodes=6, drafter_cache=False)
    first = llm.generate(PROMPTS[0], max_new_tokens=12, ignore_eos=True)
    following = [*first.prompt_tokens, *first.tokens[:-3], 50, 51, 52]
    again = llm.generate(following, max_new_tokens=12)
    plain = LLM(exact_model, tokenizer=tokenizer, drafter="plain").generate(following, max_new_tokens=12)
    assert again.tokens == plain.tokens
    assert again.stats.reused_tokens >= len(following) - 4
    assert worst(found, exact_model, "pass") < 1e-6


def test_nothing_lies_behind_the_end_of_the_context(tmp_path: Path) -> None:
    """A model with an embedding for every position fails where there is none."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=50, n_positions=24, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GPT2LMHeadModel(config).eval()
    folder = write(tmp_path, "pass", model, depths=6)
    llm = LLM(model, drafter="head", head=folder, nodes=8)
    for length, new in ((3, 100), (22, 100), (23, 100), (3, 1), (3, 2), (3, 3)):
        prompt = [1 + place % 40 for place in range(length)]
        found = llm.generate(prompt, max_new_tokens=new, ignore_eos=True)
        plain = llm.generate(prompt, max_new_tokens=new, ignore_eos=True, drafter="plain")
        assert found.tokens == plain.tokens
        assert len(found.tokens) == min(new, 24 - length)


@pytest.mark.slow
def test_probes_draft_beside_heads_and_early_exits(tiny_model: Any, tokenizer: Any, tmp_path: Path) -> None:
    import heads

    folders = [write(tmp_path / kind, kind, tiny_model) for kind in KINDS]
    folders.append(heads.write(tmp_path / "medusa", "medusa", tiny_model.config.vocab_size))
    plain = LLM(tiny_model, tokenizer=tokenizer, drafter="plain").generate(PROMPTS, max_new_tokens=20)
    llm = LLM(tiny_model, tokenizer=tokenizer, head=[*folders, folders[0]], draft="self:first=1", nodes=24)
    found = llm.generate(PROMPTS, max_new_tokens=20)
    assert [text.tokens for text in found] == [text.tokens for text in plain]
    assert {"pass", "pass2", "space", "medusa", "draft"} <= found[0].stats.drafter.keys()


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "is_used"), [({1: 1.0, 64: 1.01}, True), ({1: 1.0, 2: 5.0, 64: 300.0}, False)])
def test_groups_ride_where_they_pay(seconds: dict[int, float], is_used: bool, tiny_model: Any, tmp_path: Path) -> None:
    target = LLM(tiny_model).target
    drafter = HeadDrafter(head=str(write(tmp_path, "pass", tiny_model)))
    stats = run(target, drafter, [5, 6, 7, 8], latency=FixedLatency(target, seconds)).stats
    groups = stats.drafter["pass"]["groups"]
    assert groups >= stats.steps // 2 if is_used else groups == 0


# -------------------------------------------------------------------------------------------------------- refusals


def refused(error: type[LeapaheadError], model: Any, folder: Path, **options: Any) -> str:
    with pytest.raises(error) as found:
        LLM(model, drafter="head", head=str(folder), **options)
    assert "\n" not in str(found.value)
    return str(found.value)


def test_other_targets_are_refused_by_name(tiny_model: Any, tmp_path: Path) -> None:
    from leapahead.models.toy import ToyTarget

    folder = write(tmp_path, "pass", tiny_model)
    toy = ToyTarget()
    message = refused(Refused, toy, folder)
    assert f"the head {folder} needs embeddings from the target, which {toy.info.name} does not have" in message
    assert "only models of Transformers with tree attention" in message
    assert "in exact mode; leave out the head, or leave out exact" in refused(Refused, tiny_model, folder, exact=True)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"leapahead_probes": "spaces"}, Refused, "holds probes of kind 'spaces', which is not supported"),
        ({"num_probes": 4}, BadParameter, "has 3 embeddings for num_probes=4 of pass; the file is broken"),
        ({"num_probes": None}, BadParameter, "lack what is needed"),
        ({"vocab_size": 7}, BadParameter, "expects a vocabulary of 7"),
    ],
)
def test_broken_files_are_refused(
    changes: dict[str, Any], error: type[LeapaheadError], message: str, tiny_model: Any, tmp_path: Path
) -> None:
    given = {"leapahead_probes": "pass", "num_probes": 3, "vocab_size": tiny_model.config.vocab_size, **changes}
    checkpoint.write(tmp_path, given, {"embeddings.weight": embeddings_of("pass", tiny_model)})
    assert message in refused(error, tiny_model, tmp_path)


def test_wrong_tensors_are_refused(tiny_model: Any, tmp_path: Path) -> None:
    given = {"leapahead_probes": "pass", "num_probes": 3, "vocab_size": tiny_model.config.vocab_size}
    good = embeddings_of("pass", tiny_model)
    for tensors, error, message in (
        ({"embeddings.weight": good[:, :5]}, BadParameter, "hidden states of width 5"),
        ({"embeddings.weight": good * float("nan")}, BadParameter, "they must be finite"),
        (
            {"embeddings.weight": good, "fc.weight": good.clone()},
            Refused,
            "has the tensor fc.weight, which is",
        ),
        ({"fc.bias": good}, BadParameter, "lack what is needed"),
    ):
        checkpoint.write(tmp_path, given, tensors)
        assert message in refused(error, tiny_model, tmp_path)


def test_a_model_that_takes_no_embeddings_is_refused(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    forward = type(model).forward

    def scaled(self: Any, *args: Any, inputs_embeds: Any = None, **options: Any) -> Any:
        """As of a model that scales the embeddings of tokens, and takes others to be scaled already."""
        return forward(self, *args, inputs_embeds=None if inputs_embeds is None else 2 * inputs_embeds, **options)

    scaled.__signature__ = __import__("inspect").signature(forward)  # type: ignore[attr-defined]
    monkeypatch.setattr(type(model), "forward", scaled)
    assert "takes no embeddings, since its logits are others" in refused(Refused, model, write(tmp_path, "pass", model))


def test_unknown_probes_fail_their_request_by_name(tiny_model: Any) -> None:
    target = LLM(tiny_model).target
    drafter = Scripted(lambda sequence, budget: TokenTree.root(sequence.root).with_probes([Probes(0, (1 << 20,))]))
    with pytest.raises(DraftError, match="drafted probes whose embeddings were not added to the target"):
        run(target, drafter)
    ids = target.add_embeddings(embeddings_of("pass", tiny_model))
    assert list(ids) == list(target.embeddings())
    assert ids.start >= target.info.vocab_size
    known = Scripted(lambda sequence, budget: TokenTree.root(sequence.root).with_probes([Probes(0, tuple(ids))]))
    assert run(target, known).tokens == run(target).tokens
