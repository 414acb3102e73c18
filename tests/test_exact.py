"""Exact mode: a token's logits are the same bits with every draft, batch and schedule, in half precision too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from helpers import mostly_slow

from leapahead import LLM, Engine, Request
from leapahead.check import check
from leapahead.core.errors import BadParameter, Refused
from leapahead.core.sampling import SamplingParams
from leapahead.core.stop import StopParams
from leapahead.core.tree import Budget, TokenTree
from leapahead.core.verify import Verdict, verify
from leapahead.drafters.base import Drafter, PerSequence, SequenceDrafter
from leapahead.drafters.plain import Plain
from leapahead.models.base import read_prompt
from leapahead.models.toy import ToyTarget
from leapahead.models.transformers.exact import CHUNK, STEP_ROWS, ExactExecutor, ExactRow
from leapahead.models.transformers.kv_cache import Row
from leapahead.models.transformers.model import TransformersTarget
from leapahead.models.transformers.ordered import Part
from leapahead.planner.draft import Proposal, SequenceView
from tests.architectures import BY_NAME
from tests.helpers import GREEDY, NoisyChain, Oracle, RandomTrees, Scattered

Text = tuple[list[int], list[bytes]]  # new tokens, and the bytes of the logits after which each was chosen
WIDE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 320,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "vocab_size": 512,
}


class Mixed(SequenceDrafter):
    """Drafts of all kinds in turns, from the texts that plain decoding gives, of any size that is allowed."""

    name: ClassVar[str] = "mixed"

    def __init__(self, texts: Sequence[Sequence[int]], seed: int = 0) -> None:
        self.texts, self.rng = [list(text) for text in texts], np.random.default_rng(seed)

    def propose(self, sequence: SequenceView, budget: Budget) -> Proposal:
        text = next(text for text in self.texts if text[: len(sequence.tokens)] == sequence.tokens)
        nodes, kind = int(self.rng.integers(0, budget.nodes + 1)), int(self.rng.integers(5))
        if nodes == 0 or kind == 0:
            return Proposal(TokenTree.root(sequence.root))
        seed = int(self.rng.integers(1 << 30))
        drafters = (Oracle(text, nodes), NoisyChain(text, seed), RandomTrees(seed), Scattered(text, seed, nodes))
        return drafters[kind - 1].propose(sequence, Budget(nodes, budget.depth, budget.leaves))


def texts(
    target: Any,
    drafter: Any,
    prompts: Sequence[Sequence[int]],
    batch: int = 1,
    new: int = 24,
    params: SamplingParams = GREEDY,
    prefill_chunk: int | None = None,
) -> list[Text]:
    """Every prompt's new tokens and the bits that they were chosen by."""
    engine = Engine(target, max_batch=batch, prefill_chunk=prefill_chunk)
    made: Drafter = engine.drafter(drafter if isinstance(drafter, (type, str)) else PerSequence(lambda: drafter))
    found: list[list[bytes]] = [[] for _ in prompts]

    def watch(index: int) -> Any:
        def on_choices(proposal: Any, choices: Any) -> None:
            logits = choices.logits
            rows = logits[list(verify(proposal.tree, choices).path)]
            found[index].extend(bytes(np.ascontiguousarray(_host(row))) for row in rows)

        return on_choices

    requests = [
        Request(list(prompt), made, params, StopParams(max_new_tokens=new), on_choices=watch(index))
        for index, prompt in enumerate(prompts)
    ]
    handles = [engine.submit(request) for request in requests]
    engine.run(handles)
    return [(handle.tokens, bits[: len(handle.tokens)]) for handle, bits in zip(handles, found, strict=True)]


def _host(row: Any) -> np.ndarray:
    return row.float().numpy() if isinstance(row, torch.Tensor) else np.asarray(row)


def differing(target: Any, prompts: Sequence[Sequence[int]], batch: int = 1, seed: int = 0, **options: Any) -> int:
    """How many tokens of drafted texts are not chosen by the bits of plain decoding's, read one prompt at a time."""
    plain = [texts(target, Plain, [prompt], **options)[0] for prompt in prompts]
    known = [[*prompt, *tokens] for prompt, (tokens, _) in zip(prompts, plain, strict=True)]
    target.forget()
    drafted = texts(target, Mixed(known, seed), prompts, batch, **options)
    return sum(
        mine != theirs
        for (own, own_bits), (other, other_bits) in zip(plain, drafted, strict=True)
        for mine, theirs in zip(
            zip(own, own_bits, strict=True), zip(other, other_bits, strict=True), strict=len(own) == len(other)
        )
    ) + abs(sum(len(own) for own, _ in plain) - sum(len(other) for other, _ in drafted))


def prompts_of(lengths: Sequence[int], vocabulary: int = 120) -> list[list[int]]:
    rng = np.random.default_rng(7)
    return [rng.integers(3, vocabulary, size=length).tolist() for length in lengths]


# Two threads wait for each other where tests beside this one keep the cores busy, which takes half a minute then.
@pytest.fixture(params=mostly_slow([1, 2], 1))
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def exact(name: str, dtype: torch.dtype = torch.bfloat16, static: Any = "auto", **options: Any) -> TransformersTarget:
    architecture = BY_NAME[name]
    wide = type(architecture)(name, architecture.config, architecture.expect, {**architecture.options, **options})
    return TransformersTarget(wide.build(dtype), name=name, exact=True, static=static)


FAMILIES = ("llama", "mistral", "gemma2", "gemma3", "mixtral", "qwen3_moe")
SMALL = {"hidden_size": 64, "intermediate_size": 160}


@pytest.mark.parametrize("name", mostly_slow(FAMILIES, "gemma2"))
def test_bits_do_not_depend_on_drafts_and_batches(name: str) -> None:
    """Windows, experts and soft-capped scores among them; the texts pass the borders of chunks and blocks."""
    target = exact(name, **SMALL)
    assert target.info.exact
    assert differing(target, prompts_of((5, 60, 118)), batch=3) == 0
    sampled = SamplingParams(temperature=0.8, seed=3)
    assert differing(target, prompts_of((60, 9)), batch=2, new=12, params=sampled) == 0


def test_bits_with_one_and_two_threads(threads: int) -> None:
    assert differing(exact("llama", torch.float32, **SMALL), prompts_of((122,)), new=10) == 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", [*FAMILIES, "phi3", "qwen2"])
def test_bits_of_long_texts(name: str, dtype: torch.dtype, threads: int) -> None:
    target = exact(name, dtype, **WIDE)
    for lengths in ((10, 70, 124, 300), (1200, 130, 63, 64)):
        for params in (GREEDY, SamplingParams(temperature=0.8, seed=3)):
            assert differing(target, prompts_of(lengths, 512), batch=4, new=60, params=params) == 0


@pytest.mark.slow
def test_bits_do_not_depend_on_the_chunks_that_the_scheduler_wants() -> None:
    target = exact("llama", **SMALL)
    prompts = prompts_of((100, 70))
    whole = texts(target, Plain, prompts[:1])
    target.forget()
    assert texts(target, Plain, prompts, batch=2, prefill_chunk=7)[:1] == whole


@pytest.mark.slow
def test_entries_of_a_text_are_not_taken_over_as_those_of_a_prompt() -> None:
    """The next prompt begins with the first one and its text, as in a conversation."""
    target = exact("llama", **SMALL)
    (first,) = prompts_of((100,))
    new = texts(target, Plain, [first], new=60)[0][0]
    longer = [*first, *new, 5, 6, 7]
    engine = Engine(target)
    handle = engine.submit(Request(longer, engine.drafter(Plain), stop=StopParams(max_new_tokens=1)))
    engine.run([handle])
    assert handle.stats.reused_tokens == 64  # a whole chunk of the first prompt, and nothing of its text
    again = texts(target, Plain, [longer])
    target.forget()
    assert texts(target, Plain, [longer]) == again


def test_a_text_is_read_again_as_steps_have_read_it() -> None:
    """After an interrupt. The stand-in for a library's kernels rounds products of many rows in another way."""
    model = BY_NAME["llama"].build(torch.float32)
    for each in model.modules():
        if isinstance(each, torch.nn.Linear):
            each.register_forward_hook(lambda _, rows, out: out * (1 + 3e-7 * (rows[0].shape[-2] > STEP_ROWS)))
    target = TransformersTarget(model, name="llama", exact=True)
    (text,) = prompts_of((60,))

    def logits(lost_at: int) -> list[torch.Tensor]:
        session, found = target.open(text[:20], GREEDY), []
        read_prompt(target, session)
        for at in range(20, 60):
            if at == lost_at:
                session.state.row.length = 0  # type: ignore[attr-defined]  # as in an exchange of rows that is cut off
                read_prompt(target, session)
            found.append(target.step([session], [TokenTree.root(session.tokens[-1])])[0].logits.clone())
            session.commit(Verdict((0,), (text[at],), 0))
        session.close()
        return found

    assert all(map(torch.equal, logits(0), logits(47)))


def assert_samples_are_those_of_each_alone(target: Any, prompt: list[int]) -> None:
    params = [SamplingParams(temperature=1.0, seed=seed) for seed in (1, 2)]
    engine = Engine(target)
    request = Request(prompt, engine.drafter("prompt_lookup"), params[0], StopParams(max_new_tokens=20))
    handles = engine.submit_samples(request, params)
    engine.run(handles)
    alone = [texts(target, Plain, [prompt], new=20, params=each)[0][0] for each in params]
    assert [handle.tokens for handle in handles] == alone


@pytest.mark.slow
def test_samples_of_one_prompt_have_the_bits_of_each_alone() -> None:
    assert_samples_are_those_of_each_alone(exact("llama", **SMALL), prompts_of((70,))[0])


def test_trees_are_limited_to_the_rows_of_a_step() -> None:
    target = exact("llama", **SMALL)
    assert target.max_nodes == STEP_ROWS
    session = target.open([1, 2], GREEDY)
    target.prefill(session, 8)
    with pytest.raises(BadParameter, match="a tree of 9 nodes is more than the 8 rows"):
        target.step([session], [TokenTree.chain(2, range(3, 11))])


# ------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("dbrx", "its experts are computed by the number of tokens that go to each of them"),
        ("llama4", "its experts are computed by the number of tokens"),
        ("bloom", "not all of its layers are attention over a KV cache"),
        ("gpt_oss", "the attention of GptOssAttention uses s_aux"),
    ],
)
def test_what_cannot_be_exact_is_refused_by_name(name: str, why: str) -> None:
    with pytest.raises(Refused, match=f"{name} cannot be decoded in exact mode .*{why}"):
        exact(name)


def test_a_target_that_is_not_exact_cannot_be_asked_for_it() -> None:
    with pytest.raises(BadParameter, match="exact=True is not possible with the target"):
        LLM(ToyTarget(), exact=True)


@pytest.mark.slow
def test_a_module_of_the_user_keeps_its_own_attention() -> None:
    model = BY_NAME["llama"].build(torch.bfloat16)
    llm = LLM(model, exact=True)
    result = llm.generate([1, 2, 3], max_new_tokens=4)
    assert llm.target.info.exact
    assert len(result.tokens) == 4
    assert model.config._attn_implementation == "sdpa"


# ----------------------------------------------------------------------------------------------------- mutations


@pytest.mark.slow
def test_mutation_rows_that_are_not_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 a matrix product of one row has a kernel of its own on every CPU that this was tried on."""
    whole = ExactExecutor._forward

    def unpadded(self: Any, drafts: Any, size: int, *args: Any, **options: Any) -> Any:
        return whole(self, drafts, sum(draft.new for draft in drafts), *args, **options)

    target = exact("llama", torch.float32, **SMALL)
    monkeypatch.setattr(ExactExecutor, "_forward", unpadded)
    assert differing(target, prompts_of((20,))) > 0
    with pytest.raises(Refused, match="are not those of plain decoding bit for bit"):
        exact("llama", torch.float32, **SMALL)


@pytest.mark.slow
def test_mutation_entries_that_are_not_gathered_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The right entries of a path, in another order. In half precision such a difference is often rounded away."""
    whole = Part.of.__func__  # type: ignore[attr-defined]

    def swapped(cls: Any, batch: int, rows: slice, total: int, tree: Any, first: int, length: int, *args: Any) -> Part:
        part: Part = whole(cls, batch, rows, total, tree, first, length, *args)
        for path in part.paths:
            if path is not None and length - part.begin >= 2:
                path[: length - part.begin] = path[: length - part.begin].flip(0)
        return part

    target = exact("llama", torch.float32, **SMALL)
    monkeypatch.setattr(Part, "of", classmethod(swapped))
    assert differing(target, prompts_of((20, 100))) > 0
    with pytest.raises(Refused, match="are not those of plain decoding bit for bit"):
        exact("llama", torch.float32, **SMALL)


@pytest.mark.slow
def test_mutation_attention_that_sums_over_what_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """The entries of rejected nodes and of other branches are masked, and lie between those of the path."""

    def by_slots(self: Part, query: Any, keys: Any, values: Any, mask: Any, softcap: float | None = None) -> Any:
        outputs = []
        for path in self.paths:
            slots = torch.arange(self.end)
            places = slots.clone()
            if path is not None:
                places[path] = slots[self.begin :]
            key, value, own = keys[:, : self.end], values[:, : self.end], mask[:, places]
            scores = (query @ key.mT).view(len(query), -1, len(mask), self.end) + own
            outputs.append(torch.softmax(scores, -1).view(len(query), -1, self.end) @ value)
        return self._own(outputs)

    target = exact("llama", **SMALL)
    monkeypatch.setattr(Part, "attend", by_slots)
    assert differing(target, prompts_of((20, 100))) > 0


@pytest.mark.slow
def test_mutation_reuse_of_what_steps_have_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ExactRow, "common", Row.common)
    with pytest.raises(AssertionError):
        test_entries_of_a_text_are_not_taken_over_as_those_of_a_prompt()


def test_mutation_chunks_that_are_not_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every forward of a prompt begins and ends at a multiple of the chunk, as far as the prompt goes."""
    began: list[int] = []
    whole = ExactExecutor._forward

    def watched(self: Any, drafts: Any, size: int, *args: Any, **options: Any) -> Any:
        if size == CHUNK:
            began.append(drafts[0].row.length)
        return whole(self, drafts, size, *args, **options)

    monkeypatch.setattr(ExactExecutor, "_forward", watched)
    target = exact("llama", **SMALL)
    began.clear()
    texts(target, Plain, prompts_of((200, 150)), batch=2, new=2, prefill_chunk=50)
    assert sorted(began) == [0, 0, 64, 64, 128, 128, 192]
    monkeypatch.setattr(ExactExecutor, "chunk_end", lambda self, start: start + 50)
    began.clear()
    target.forget()
    texts(target, Plain, prompts_of((199,)), new=2)
    assert any(start % CHUNK for start in began)


# --------------------------------------------------------------------------------------------------------- check


@pytest.mark.slow
def test_check_finds_no_difference_and_counts_no_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    target = exact("llama", **SMALL)
    prompts = prompts_of((20, 70, 40))
    report = check(target, None, prompts, ["lookahead", "auto"], max_new_tokens=40, batch=3)
    assert report.ok
    assert not any(row.differences for row in report.drafters)

    noise = np.random.default_rng(0)

    def noisy(self: Any, *args: Any, **options: Any) -> Any:
        """Rounding that differs from forward to forward."""
        first, *others = whole(self, *args, **options)
        moved = torch.from_numpy(noise.normal(size=first.logits.shape) * 0.05).to(first.logits.dtype)
        return [first._replace(logits=first.logits + moved), *others]

    whole = ExactExecutor.run
    monkeypatch.setattr(ExactExecutor, "run", noisy)
    report = check(target, None, prompts, ["lookahead"], max_new_tokens=40, batch=1)
    (row,) = report.drafters
    assert not row.ties
    assert row.mismatches
    assert not report.ok
