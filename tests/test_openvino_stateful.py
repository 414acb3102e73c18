"""OpenVINO models that are decoded by their own states, since paged attention cannot compute them: chains only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
import torch
from architectures import BY_NAME, VOCABULARY
from helpers import GREEDY
from openvino import opset13

from leapahead import SamplingParams
from leapahead.check import check
from leapahead.core.errors import BadParameter, CacheFull, LeapaheadError, Refused
from leapahead.core.tree import TokenTree
from leapahead.core.verify import Verdict
from leapahead.engine.scheduler import Engine
from leapahead.models.base import CHAIN, TREE, Capture, read_prompt
from leapahead.models.openvino import folder, stateful
from leapahead.models.openvino.compiled import run
from leapahead.models.openvino.export import export
from leapahead.models.openvino.options import OpenVinoOptions
from leapahead.models.openvino.stateful import StatefulModel

# Soft caps and windows; ALiBi; windows by slots; latent attention; chunks; sinks and experts.
FAMILIES = ("gemma2", "bloom", "gpt_neo", "deepseek_v3", "deepseek_v2", "llama4", "llama4_tuned", "falcon_alibi")
FAMILIES += ("gpt_oss", "gptj", "codegen", "mpt", "xglm")
CHAINS = ("auto", "prompt_lookup", "suffix", "ngram")
Reference = Callable[[list[int]], Any]


def exported(name: str, place: Path) -> tuple[Any, Path]:
    """The model in float32, and its folder for OpenVINO."""
    model = BY_NAME[name].build()
    model.save_pretrained(place / "model")
    return model, export(place / "model", place / "exported", "f32").path


@pytest.fixture(scope="module")
def gemma2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    return exported("gemma2", tmp_path_factory.mktemp("gemma2"))


@pytest.fixture(scope="module")
def shared_target(gemma2: tuple[Any, Path]) -> Any:
    return folder.load(gemma2[1], OpenVinoOptions(n_threads=1))


@pytest.fixture
def target(shared_target: Any) -> Any:
    shared_target.forget()
    return shared_target


def logits_of(model: Any) -> Reference:
    """Transformers' logits after every token, [tokens, vocab]."""

    def logits(tokens: list[int]) -> Any:
        with torch.no_grad():
            return model(torch.tensor([tokens])).logits[0].numpy()

    return logits


@pytest.fixture(scope="module")
def reference(gemma2: tuple[Any, Path]) -> Reference:
    return logits_of(gemma2[0])


def text(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCABULARY, length).tolist()


def opened(target: Any, tokens: list[int], chunk: int = 512, **options: Any) -> Any:
    session = target.open(tokens, SamplingParams(), **options)
    read_prompt(target, session, chunk)
    return session


def close(here: Any, there: Any) -> None:
    np.testing.assert_allclose(here, there, rtol=1e-3, atol=2e-3)


def after(target: Any, session: Any) -> Any:
    """The logits after the last token, from a plain step that is not committed."""
    return target.step([session], [TokenTree.root(session.tokens[-1])])[0].logits[0]


@pytest.mark.slow
def test_it_is_decoded_by_chains(target: Any) -> None:
    assert isinstance(target.model, StatefulModel)
    assert CHAIN in target.info.capabilities
    assert TREE not in target.info.capabilities
    assert target.max_leaves == 1
    with pytest.raises(Refused, match="drafter 'lookahead' needs tree from the target, which exported does not have"):
        Engine(target).drafter("lookahead")


@pytest.mark.parametrize("chunk", [1, 7, 512])
@pytest.mark.parametrize("length", [1, 8, 40])
def test_logits_are_those_of_transformers(target: Any, reference: Reference, length: int, chunk: int) -> None:
    """Behind the window of eight tokens too."""
    tokens = text(length + 6)
    session = opened(target, tokens[:length], chunk)
    expected = reference(tokens)
    for index in range(length, len(tokens)):
        close(after(target, session), expected[index - 1])
        session.commit(Verdict((0,), (tokens[index],), 0))
    session.close()


def test_rejected_tokens_leave_no_trace(target: Any, reference: Reference) -> None:
    """Sequences of different lengths, in one step, with drafts of which all, some or no tokens are accepted."""
    texts = [text(length + 12, seed) for seed, length in enumerate((30, 5, 61))]
    sessions = [opened(target, each[:-12]) for each in texts]
    for accepted in (2, 0, 1, 3):
        begins = [len(session.tokens) for session in sessions]
        drafts = [
            TokenTree.chain(each[begin - 1], [*each[begin : begin + accepted], *[9] * (3 - accepted)])
            for each, begin in zip(texts, begins, strict=True)
        ]
        drafts[1] = TokenTree.root(texts[1][begins[1] - 1])
        found = target.step(sessions, drafts)
        for index, (session, each, begin) in enumerate(zip(sessions, texts, begins, strict=True)):
            kept = 0 if index == 1 else accepted
            close(found[index].logits[: kept + 1], reference(each)[begin - 1 : begin + kept])
            session.commit(Verdict(tuple(range(kept + 1)), tuple(each[begin : begin + kept + 1]), kept))
    for session in sessions:
        session.close()


def test_a_draft_may_grow_and_is_forgotten(target: Any, reference: Reference) -> None:
    tokens = text(45)
    session, expected = opened(target, tokens[:40]), reference(tokens)
    target.step([session], [TokenTree.chain(tokens[39], [tokens[40]])])
    grown = target.step([session], [TokenTree.chain(tokens[39], tokens[40:43])], [2])[0]
    close(grown.logits, expected[41:43])
    close(after(target, session), expected[39])
    session.close()


@pytest.mark.parametrize("late", [False, True])
def test_an_interrupted_forward_is_repeated(
    late: bool, target: Any, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt reaches Python before a forward or behind it, when the states have its tokens."""

    def interrupted(request: Any) -> None:
        if late:
            run(request)
        raise KeyboardInterrupt

    tokens = text(20)
    session = target.open(tokens, GREEDY)
    for forward in (
        lambda: read_prompt(target, session),
        lambda: target.step([session], [TokenTree.chain(tokens[-1], [1, 2])]),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(stateful, "run", interrupted)
            with pytest.raises(KeyboardInterrupt):
                forward()
        read_prompt(target, session)
    close(after(target, session), reference(tokens)[-1])
    session.close()


def test_prompts_that_begin_alike_and_forks(target: Any, reference: Reference) -> None:
    first, second = text(80), [*text(50), *text(30, 1)]
    one = opened(target, first)
    two = target.open(second, SamplingParams())
    assert two.unread == len(second) - 1 - 50
    read_prompt(target, two)
    twin = target.fork(two, SamplingParams())
    close(after(target, one), reference(first)[-1])
    target.step([two, twin], [TokenTree.root(second[-1])] * 2)
    two.commit(Verdict((0,), (5,), 0))
    twin.commit(Verdict((0,), (6,), 0))
    found = target.step([two, twin], [TokenTree.root(5), TokenTree.root(6)])
    close(found[0].logits[0], reference([*second, 5])[-1])
    close(found[1].logits[0], reference([*second, 6])[-1])
    for session in (one, two, twin):
        session.close()
    again = target.open([*second, 5, 9], SamplingParams())
    assert again.unread == 1
    read_prompt(target, again)
    close(after(target, again), reference([*second, 5, 9])[-1])
    again.close()
    strangers = target.open([*second, 5, 9], SamplingParams(), owner="another")
    assert strangers.unread == len(second) + 1
    strangers.close()


def test_a_prompt_of_one_token_is_forked(target: Any, reference: Reference) -> None:
    """Its states, which no forward has written yet, cannot be read."""
    one = opened(target, [7])
    twin = target.fork(one, SamplingParams())
    one.close()
    close(after(target, twin), reference([7])[-1])
    twin.close()


def test_captures(target: Any, gemma2: tuple[Any, Path], reference: Reference) -> None:
    tokens = text(40)
    session = target.open(tokens, SamplingParams(), Capture(top_k=3, hidden=(-1,)))
    given = read_prompt(target, session, 16)
    with torch.no_grad():
        states = gemma2[0].model(torch.tensor([tokens])).last_hidden_state[0].numpy()
    close(np.concatenate([rows.hidden for rows in given]), states[:39])
    likeliest = np.concatenate([rows.top_k(3)[0] for rows in given])
    assert (likeliest == np.argsort(-reference(tokens)[:39], axis=1)[:, :3]).all()
    session.close()


def test_the_cache_has_a_limit(gemma2: tuple[Any, Path], reference: Reference) -> None:
    """What is kept of closed sequences makes room for open ones."""
    target = folder.load(gemma2[1], OpenVinoOptions(n_threads=1, cache_tokens=100))
    for seed in range(4):
        tokens = text(60, seed)
        session = opened(target, tokens)
        close(after(target, session), reference(tokens)[-1])
        with pytest.raises(CacheFull, match="the cache holds 100 tokens, too few for 2 sequences"):
            target.open(text(50, 9), SamplingParams())
        session.close()
    assert sum(each.length for each in target.pool._idle) <= 100
    target.forget()
    with pytest.raises(CacheFull):
        target.open(text(101), SamplingParams())


def assert_checked(target: Any, drafters: Sequence[str] = CHAINS, prompts: int = 3, new: int = 24) -> None:
    texts = [text(8 + 13 * seed, seed) for seed in range(prompts)]
    for params in (GREEDY, SamplingParams(temperature=0.8, seed=3)):
        report = check(target, None, texts, drafters, max_new_tokens=new, sampling=params, batch=3)
        assert report.ok, [row.differences for row in report.drafters]
        assert report.tokens == prompts * new
        assert [row.tokens for row in report.drafters] == [report.tokens] * len(drafters)


def test_texts_are_those_of_plain_decoding(target: Any) -> None:
    assert_checked(target, ("auto", "suffix"), new=16)


def test_exact_mode(gemma2: tuple[Any, Path]) -> None:
    from test_exact import differing, prompts_of
    from test_openvino import HAS_BF16

    if not HAS_BF16:
        pytest.skip("OpenVINO does not compute with bfloat16 on this processor")
    target = folder.load(gemma2[1], OpenVinoOptions(n_threads=1, precision="bf16"), exact=True)
    assert target.info.exact
    assert differing(target, prompts_of((5, 60, 40)), batch=3) == 0


def test_several_copies_are_refused(gemma2: tuple[Any, Path]) -> None:
    with pytest.raises(BadParameter, match=r"copies=2 is not possible .* it is decoded by its own states"):
        folder.load(gemma2[1], OpenVinoOptions(n_threads=1, copies=2))


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str, tmp_path: Path) -> None:
    """Logits of long texts are Transformers', and texts with drafts are plain decoding's."""
    model, place = exported(name, tmp_path)
    target = folder.load(place, OpenVinoOptions(n_threads=1))
    # Of gptj and codegen, paged attention computes the graphs that some versions of Transformers give.
    assert isinstance(target.model, StatefulModel) or name in ("gptj", "codegen")
    tokens = text(70)
    session, expected = opened(target, tokens[:50], 16), logits_of(model)(tokens)
    for index in range(50, 70, 2):
        rows = target.step([session], [TokenTree.chain(tokens[index - 1], [tokens[index], 7, 7])])[0].logits
        close(rows[:2], expected[index - 1 : index + 1])
        session.commit(Verdict((0, 1), tuple(tokens[index : index + 2]), 1))
    session.close()
    assert_checked(target)


def test_mutation_entries_that_are_not_cut_off(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test of a model at construction notices it, too."""
    monkeypatch.setattr(type(target.pool), "cut", lambda self, track, length: None)
    with pytest.raises(LeapaheadError):  # refused, or OpenVINO finds that the mask and the states have other lengths
        folder.load(target.model.file.parent, OpenVinoOptions(n_threads=1))


# ------------------------------------------------------------------------------------------------------- refusals


def written(graph: Any, place: Path) -> Path:
    ov.save_model(graph, place / "openvino_model.xml")
    return place


def test_states_that_do_not_grow_are_refused(tmp_path: Path) -> None:
    """As those of recurrent layers, in folders of other exporters."""
    (tmp_path / "config.json").write_text("{}")
    ids = opset13.parameter([-1, -1], np.int64, name="input_ids")
    ids.output(0).get_tensor().set_names({"input_ids"})
    table = opset13.constant(np.ones((10, 4), np.float32))
    rows = opset13.gather(table, ids, opset13.constant(0))
    before = opset13.read_value(opset13.constant(np.zeros((1, 1, 4), np.float32)), "state")
    total = opset13.add(before, opset13.reduce_sum(rows, opset13.constant([1]), keep_dims=True))
    logits = opset13.matmul(opset13.add(rows, total), opset13.constant(np.ones((4, 10), np.float32)), False, False)
    logits.output(0).get_tensor().set_names({"logits"})
    graph = ov.Model([opset13.result(logits)], [opset13.assign(total, "state")], [ids], "recurrent")
    with pytest.raises(Refused, match="has states that do not grow with the text, such as those of recurrent layers"):
        folder.load(written(graph, tmp_path))
    more = opset13.parameter([-1, -1], np.int64, name="token_type_ids")
    more.output(0).get_tensor().set_names({"token_type_ids"})
    logits = opset13.matmul(rows, opset13.constant(np.ones((4, 10), np.float32)), False, False)
    logits.output(0).get_tensor().set_names({"logits"})
    graph = ov.Model([opset13.result(logits)], [ids, more], "more")
    with pytest.raises(Refused, match="its input 'token_type_ids' is not known"):
        folder.load(written(graph, tmp_path))
