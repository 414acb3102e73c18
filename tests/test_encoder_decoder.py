"""Encoder-decoder targets: Transformers' own greedy text, with every drafter, in batches of different sources."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from architectures import VOCABULARY, sharpen
from helpers import Oracle, RandomTrees, Scattered, Scripted, attached
from seq2seq import BART, MODELS, T5, build, own_text
from serving import Letters, serving

from leapahead import LLM, Engine, Request, hf
from leapahead.check import check
from leapahead.core.errors import BadParameter, ContextOverflow, Refused
from leapahead.core.sampling import SamplingParams
from leapahead.core.stop import StopParams
from leapahead.core.tree import TokenTree
from leapahead.core.verify import Verdict
from leapahead.drafters.base import PerSequence
from leapahead.models.base import CHAIN, TREE, read_prompt
from leapahead.models.decoder import DecoderInput
from leapahead.models.transformers import executors
from leapahead.models.transformers.decoder_view import DecoderView, PositionEmbeddings, RelativeBias
from leapahead.models.transformers.encoder_decoder import (
    DecoderExecutor,
    EncoderDecoderTarget,
    StepExecutor,
    new_target,
)
from leapahead.models.transformers.model import TransformersTarget
from leapahead.models.transformers.selftest import OwnOutputs

TREES = [name for name in MODELS if name not in ("umt5", "m2m")]
SOME = [name if name in ("t5", "bart") else pytest.param(name, marks=pytest.mark.slow) for name in TREES]
DRAFTERS = ["jacobi", "lookahead", "prompt_lookup", "suffix", "ngram", "recycling", "auto"]
SEEDED = SamplingParams(temperature=1.0, top_p=0.95, seed=3)
GREEDY = SamplingParams()


def sources(count: int = 4, seed: int = 0) -> list[list[int]]:
    """Prompts of different lengths."""
    rng = np.random.default_rng(seed)
    return [[int(token) for token in rng.integers(13, VOCABULARY, size)] for size in (5, 14, 3, 30, 9, 21)[:count]]


class Models(dict[str, LLM]):
    """One LLM for each architecture, made when it is first asked for."""

    def __missing__(self, name: str) -> LLM:
        self[name] = LLM(build(name), drafter="plain", drafter_cache=False)
        return self[name]


@pytest.fixture(scope="module")
def llms() -> Models:
    """One LLM for each architecture."""
    return Models()


def decode(target: Any, prompts: Sequence[list[int]], make: Any, params: SamplingParams, length: int) -> list[Any]:
    """The handles of all prompts, decoded together; `make` gives the drafter of each."""
    engine = Engine(target, max_batch=len(prompts))
    stop = StopParams(max_new_tokens=length)
    handles = [
        engine.submit(Request(prompt, attached(engine, make(index)), replace(params, seed=params.seed + index), stop))
        for index, prompt in enumerate(prompts)
    ]
    engine.run(handles)
    return handles


@pytest.mark.parametrize("name", SOME)
def test_the_text_is_that_of_transformers(name: str, llms: dict[str, LLM]) -> None:
    llm, prompts = llms[name], sources()
    assert llm.target.info.capabilities >= {CHAIN, TREE}
    own = [own_text(llm.target.model.model, prompt, 24) for prompt in prompts]
    assert len({token for text in own for token in text}) > 4
    for drafter in ("plain", "prompt_lookup", "lookahead"):
        found = llm.generate(prompts, max_new_tokens=24, drafter=drafter)
        assert [list(each.tokens) for each in found] == own


@pytest.mark.slow
@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_trees_in_batches_of_different_sources(name: str, params: SamplingParams, llms: dict[str, LLM]) -> None:
    """Nodes whose slot is not their depth, in rows of different lengths."""
    target, prompts = llms[name].target, sources()
    plain = [handle.tokens for handle in decode(target, prompts, lambda index: None, params, 24)]
    alone = [
        decode(target, [prompt], lambda _: None, replace(params, seed=params.seed + index), 24)[0].tokens
        for index, prompt in enumerate(prompts)
    ]
    assert plain == alone
    start = list(target.info.decoder.start)
    makes: list[Any] = [
        lambda index: Scattered([*start, *plain[index]], seed=index),
        lambda index: RandomTrees(index),
        lambda index: [Oracle([*start, *plain[0]]), None, Scattered([*start, *plain[2]]), RandomTrees(7)][index],
    ]
    for make in makes:
        handles = decode(target, prompts, make, params, 24)
        assert [handle.tokens for handle in handles] == plain
    assert handles[0].stats.acceptance_length > 3


@pytest.mark.slow
@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_every_drafter(name: str, attention: str) -> None:
    model = build(name, attention=attention)
    llm, prompts = LLM(model, drafter="plain"), sources(6)
    own = [own_text(model, prompt, 60) for prompt in prompts]
    seeded: dict[str, Any] = {"temperature": 0.8, "top_k": 50, "seed": 5, "max_new_tokens": 60}
    sampled = [each.tokens for each in llm.generate(prompts, **seeded)]
    for drafter in ["plain", *DRAFTERS]:
        if drafter == "lookahead" and name not in TREES:
            with pytest.raises(Refused, match="needs tree"):
                llm.generate(prompts, drafter=drafter)
            continue
        found = llm.generate(prompts, max_new_tokens=60, drafter=drafter)
        assert [list(each.tokens) for each in found] == own, drafter
        assert [each.tokens for each in llm.generate(prompts, drafter=drafter, **seeded)] == sampled, drafter


@pytest.mark.parametrize("name", [pytest.param("umt5", marks=pytest.mark.slow), "m2m"])
def test_decoders_without_trees_get_chains(name: str) -> None:
    model = build(name)
    llm, prompts = LLM(model, drafter="prompt_lookup"), sources()
    assert llm.target.info.capabilities >= {CHAIN}
    assert TREE not in llm.target.info.capabilities
    assert [list(each.tokens) for each in llm.generate(prompts, max_new_tokens=24)] == [
        own_text(model, prompt, 24) for prompt in prompts
    ]
    with pytest.raises(Refused, match="cannot be given a tree mask"):
        llm.generate(prompts, drafter="lookahead")


def test_a_decoder_may_take_one_token_at_a_time(llms: dict[str, LLM]) -> None:
    view = llms["t5"].target.model
    executor = StepExecutor(view, llms["t5"].target.cache.__class__(64))
    with torch.no_grad():
        found, _ = executors.tested(view, "t5", view.ids, [("one token at a time", lambda: executor)], OwnOutputs(view))
    assert found is executor
    assert not found.capabilities & {CHAIN, TREE}


def test_samples_share_the_source(llms: dict[str, LLM]) -> None:
    llm, prompt = llms["t5"], sources()[1]
    options: dict[str, Any] = {"max_new_tokens": 16, "temperature": 1.0}
    found = llm.generate(prompt, n=3, seed=4, drafter="suffix", **options)
    alone = [llm.generate(prompt, seed=4 + index, **options) for index in range(3)]
    assert [each.tokens for each in found] == [each.tokens for each in alone]
    assert len({tuple(each.tokens) for each in found}) == 3
    assert [each.stats.prefill_forwards for each in found] == [1, 0, 0] or alone[0].stats.prefill_forwards == 0


def test_a_source_is_encoded_once(llms: dict[str, LLM]) -> None:
    llm, (first, second, *_) = llms["bart"], sources()
    llm.target.forget()
    texts = [llm.generate(prompt, max_new_tokens=8) for prompt in (first, first, second, first[:-1])]
    assert [text.stats.prefill_forwards for text in texts] == [1, 0, 1, 1]
    assert [text.stats.reused_tokens for text in texts] == [0, len(first) - 1, 0, 0]
    assert texts[0].tokens == texts[1].tokens
    owned = [llm.engine.submit(Request(first, llm.engine.drafter("plain"), owner=owner)) for owner in "ab"]
    llm.engine.run(owned)
    assert [handle.stats.prefill_forwards for handle in owned] == [1, 1]  # owners never share


def test_a_text_that_has_begun_goes_on(llms: dict[str, LLM]) -> None:
    for name in ("t5", "bart"):
        target, prompt = llms[name].target, sources()[0]
        (handle,) = decode(target, [prompt], lambda _: None, GREEDY, 20)
        begin = DecoderInput((*target.info.decoder.start, *handle.tokens[:9]))
        engine = Engine(target)
        request = Request(prompt, engine.drafter("suffix"), stop=StopParams(max_new_tokens=11), begin=begin)
        engine.run([rest := engine.submit(request)])
        assert rest.tokens == handle.tokens[9:]
        fork = target.open_decoder(prompt, GREEDY, begin)
        read_prompt(target, fork)
        other = target.fork(fork, GREEDY)
        choices = target.step([fork, other], [TokenTree.root(fork.tokens[-1])] * 2)
        assert [each.of([0]).tolist() for each in choices] == [[handle.tokens[9]]] * 2
        fork.close()
        other.close()


def test_an_interrupted_forward_loses_nothing(llms: dict[str, LLM]) -> None:
    target, prompt = llms["mbart"].target, sources()[3]
    (handle,) = decode(target, [prompt], lambda _: None, GREEDY, 12)
    target.forget()
    session = target.open(prompt, GREEDY)
    encode, target.model.encode = target.model.encode, _interrupted
    with pytest.raises(KeyboardInterrupt):
        target.prefill(session, 512)
    target.model.encode = encode
    assert session.unread == len(prompt)
    read_prompt(target, session)
    text: list[int] = []
    for step in range(12):
        tree = TokenTree.chain(session.tokens[-1], [3, 4, 5])
        if step == 5:
            target.step([session], [tree])  # computed, and never committed
        chosen = int(target.step([session], [tree])[0].of([0])[0])
        chosen = target.info.decoder.forced_bos if step == 0 else chosen
        session.commit(Verdict((0,), (chosen,), 0))
        text.append(chosen)
    session.close()
    assert text[:-1] == handle.tokens[:-1]  # whose last one is forced


def test_a_session_that_cannot_be_opened_takes_no_row(llms: dict[str, LLM]) -> None:
    target = llms["mbart"].target
    with pytest.raises(BadParameter, match="outside the vocabulary"):
        target.open(sources()[3], SamplingParams(bad_words=((10**6,),)))
    assert not any(row.busy for row in target.cache.rows)


def _interrupted(*_: Any) -> Any:
    raise KeyboardInterrupt


def test_forced_and_suppressed_tokens(llms: dict[str, LLM]) -> None:
    """The first token of BART's texts is forced; the last one where a text is cut off; with every kind of draft."""
    llm, prompt = llms["bart"], sources()[1]
    tokens = list(llm.generate(prompt, max_new_tokens=9).tokens)
    assert tokens[0] == 1
    assert tokens[-1] == 2
    assert not {7} & set(tokens)
    target = llm.target

    def wrong(sequence: Any, budget: Any) -> TokenTree:
        return TokenTree.chain(sequence.root, [7, 5, 5][: budget.depth])

    (handle,) = decode(target, [prompt], lambda _: Scripted(wrong), GREEDY, 9)
    assert handle.tokens == tokens


def test_settings_are_read_as_transformers_reads_them() -> None:
    """A forced token that only the config names is not forced, and bad words do not ban an end of the text."""
    model, prompt = build("bart"), sources()[1]
    assert model.config.forced_eos_token_id == 2
    model.generation_config.forced_eos_token_id = None
    model.generation_config.eos_token_id = [2, own_text(model, prompt, 9)[3]]
    model.generation_config.bad_words_ids = [[7], model.generation_config.eos_token_id[1:]]
    llm = LLM(model, drafter="plain")
    for length in (3, 9):
        assert llm.generate(prompt, max_new_tokens=length).tokens == own_text(model, prompt, length)


def test_stop_strings_criteria_and_processors(llms: dict[str, LLM]) -> None:
    """What a user's function is given are the tokens of the decoder, its start token among them."""
    llm, prompt = llms["t5"], sources()[1]
    seen: list[list[int]] = []
    text = llm.generate(prompt, max_new_tokens=12, criteria=[lambda tokens: bool(seen.append(list(tokens)))])
    assert seen[-1] == [0, *text.tokens]
    stop = text.tokens[4]
    cut = llm.generate(prompt, max_new_tokens=12, stop_token_ids=[stop], drafter="lookahead")
    assert list(cut.tokens) == list(text.tokens[: list(text.tokens).index(stop) + 1])
    for options in ({"repetition_penalty": 1.3}, {"bad_words": [[stop]]}, {"min_new_tokens": 5}):
        expected = llm.generate(prompt, max_new_tokens=12, **options)
        assert llm.generate(prompt, max_new_tokens=12, drafter="suffix", **options).tokens == expected.tokens
    own = own_text(llm.target.model.model, prompt, 12, repetition_penalty=1.3)
    assert list(llm.generate(prompt, max_new_tokens=12, repetition_penalty=1.3).tokens) == own


def test_drafters_copy_from_the_source(llms: dict[str, LLM]) -> None:
    """A text that is a copy of its source is drafted from its first token on."""
    target = llms["t5"].target
    prompt = [int(token) for token in np.random.default_rng(1).permutation(np.arange(13, 60))]
    engine = Engine(target)
    for name, options in (("prompt_lookup", {}), ("suffix", {}), ("ngram", {}), ("auto", {"nodes": 8})):
        drafter = engine.drafter(name, **options)
        drafts: list[list[int]] = []
        forced = tuple((at, (token,)) for at, token in enumerate(prompt, 1))  # so that the text is a copy
        request = Request(
            prompt,
            drafter,
            SamplingParams(forced=forced),
            StopParams(max_new_tokens=len(prompt)),
            on_step=lambda step, drafts=drafts: drafts.append(step.tree.token_list),
        )
        engine.run([handle := engine.submit(request)])
        assert handle.tokens == prompt
        assert handle.stats.acceptance_length > 5, name
        assert drafts[0][1] == prompt[0], name


@pytest.mark.slow
def test_a_draft_model(llms: dict[str, LLM]) -> None:
    prompts = sources()
    for name in ("t5", "marian"):
        model = build(name)
        plain = [each.tokens for each in llms[name].generate(prompts, max_new_tokens=20)]
        llm = LLM(model, drafter="draft_model", draft=build(name), depth=3, nodes=3)
        found = llm.generate(prompts, max_new_tokens=20)
        assert [each.tokens for each in found] == plain
        assert min(each.stats.acceptance_length for each in found) > 2.5  # it is the same model
        other = LLM(model, drafter="draft_model", draft=build(name, seed=2), depth=2, nodes=4)
        assert [each.tokens for each in other.generate(prompts, max_new_tokens=20)] == plain
    sampled: dict[str, Any] = {"temperature": 1.0, "seed": 2, "max_new_tokens": 20}
    expected = [each.tokens for each in llms["marian"].generate(prompts, **sampled)]
    assert [each.tokens for each in llm.generate(prompts, **sampled)] == expected


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["pj", "pgj", "hgj"])
def test_jacobi_as_published(variant: str, llms: dict[str, LLM]) -> None:
    """Fixed blocks, the whole text at once, and plain steps behind as many tokens as the source has."""
    llm, prompts = llms["mt5"], sources()
    for params in ({}, {"temperature": 1.0, "seed": 3}):
        plain = [each.tokens for each in llm.generate(prompts, max_new_tokens=24, **params)]
        drafts: list[int] = []
        options = {"variant": variant, "block": 5}
        drafter = llm.engine.drafter("jacobi", **options)
        found = llm.generate(prompts, max_new_tokens=24, drafter="jacobi", drafter_options=options, **params)
        assert [each.tokens for each in found] == plain
    request = Request(
        prompts[0],
        drafter,
        stop=StopParams(max_new_tokens=24),
        on_step=lambda step: drafts.append(len(step.tree) - 1),
    )
    llm.engine.run([handle := llm.engine.submit(request)])
    if variant == "pj":
        assert drafts[0] == 23
        assert drafts == sorted(drafts, reverse=True)
    else:
        assert drafts[0] == 4
        assert max(drafts) <= 4
    if variant == "hgj":
        tail = 24 - len(prompts[0])
        assert drafts[-tail:] == [0] * tail
    assert handle.stats.steps == len(drafts)


def test_variants_of_jacobi_that_are_refused(llms: dict[str, LLM]) -> None:
    with pytest.raises(BadParameter, match="there is no variant 'x'; there are sliding, pj, pgj, hgj"):
        llms["t5"].engine.drafter("jacobi", variant="x")
    with pytest.raises(BadParameter, match="length=3 is for the variant hgj only"):
        llms["t5"].engine.drafter("jacobi", length=3)


@pytest.mark.slow
def test_check(llms: dict[str, LLM]) -> None:
    report = check(llms["marian"].target, None, sources(), max_new_tokens=24, batch=3)
    assert report.ok
    assert {row.name for row in report.drafters if row.refused is None} >= set(DRAFTERS)


# ------------------------------------------------------------------------------------------------------ mutations


@pytest.fixture(scope="module")
def t5(llms: dict[str, LLM]) -> EncoderDecoderTarget:
    target = llms["t5"].target
    assert isinstance(target, EncoderDecoderTarget)
    return target


def _passes(view: DecoderView) -> bool:
    """Whether trees pass the self-test."""
    target = EncoderDecoderTarget(view.model)
    return isinstance(target.executor, DecoderExecutor)


def _fails_with(monkeypatch: pytest.MonkeyPatch, view: DecoderView, kind: type, name: str, wrong: Any) -> None:
    assert _passes(view)
    with monkeypatch.context() as patch:
        patch.setattr(kind, name, wrong)
        assert not _passes(view)


@pytest.mark.slow
def test_a_wrong_position_bias_is_caught(t5: EncoderDecoderTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    right = RelativeBias.__call__
    _fails_with(monkeypatch, t5.model, RelativeBias, "__call__", lambda self, length: 0 * right(self, length))
    _fails_with(
        monkeypatch, t5.model, RelativeBias, "__call__", lambda self, length: right(self, length + 1).roll(1, 1)
    )


@pytest.mark.slow
def test_wrong_position_embeddings_are_caught(llms: dict[str, LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    right = PositionEmbeddings.__call__
    for name in ("bart", "marian"):
        view = llms[name].target.model
        wrong = lambda self, tokens, places: right(self, tokens, places + (places > places[:, :1]))  # noqa: E731
        _fails_with(monkeypatch, view, PositionEmbeddings, "__call__", wrong)
        tokens = lambda self, tokens, places: self._decoder.embed_tokens(tokens)  # noqa: E731
        _fails_with(monkeypatch, view, PositionEmbeddings, "__call__", tokens)


@pytest.mark.slow
def test_a_wrong_source_is_caught(llms: dict[str, LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    right = DecoderView.encode
    for name in ("t5", "bart"):
        view = llms[name].target.model
        with monkeypatch.context() as patch:
            patch.setattr(DecoderView, "encode", lambda self, source, states=None: right(self, source[:-1], states))
            with pytest.raises(Refused, match="cannot be decoded exactly"):
                _passes(view)
    view = llms["bart"].target.model
    _fails_with(monkeypatch, view, DecoderView, "_cross_mask", lambda self, cross: None)


@pytest.mark.slow
def test_a_prompt_may_fill_the_encoder() -> None:
    llm, prompt = LLM(build("marian")), [3, 4, 5, 6] * 24
    own = own_text(llm.target.model.model, prompt, 12)
    assert llm.generate(prompt, max_new_tokens=12).tokens == own
    assert hf.run(llm.target.model.model, torch.tensor([prompt]), max_new_tokens=12)[0, 1:].tolist() == own
    with serving(llm) as running:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 12}
        found = running.post("/v1/completions", body).json()
    assert found["usage"]["completion_tokens"] == 12


@pytest.mark.filterwarnings("ignore:Input ids are automatically padded")
def test_an_encoder_may_read_more_than_its_decoder_writes() -> None:
    sizes = {"max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 32, "attention_window": 8}
    config = transformers.LEDConfig(**{**BART, **sizes}, decoder_start_token_id=2)
    model = transformers.AutoModelForSeq2SeqLM.from_config(config).eval()
    llm = LLM(model)
    assert llm.target.info.decoder.longest_source == 64
    assert len(llm.generate([5] * 64, max_new_tokens=99, ignore_eos=True).tokens) == 31
    with pytest.raises(ContextOverflow, match="64"):
        llm.generate([5] * 65)
    chat = {"messages": [{"role": "user", "content": "a" * 40}], "max_tokens": 12, "ignore_eos": True}
    with serving(LLM(model, tokenizer=Letters())) as running:  # a chat is the encoder's, the answer the decoder's
        found = running.post("/v1/chat/completions", chat)
    assert found.status_code == 200, found.text
    assert found.json()["usage"]["prompt_tokens"] >= 40
    assert found.json()["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize(("kind", "reserved"), [("Bert", 0), ("Roberta", 2)])
def test_an_encoder_and_a_decoder_with_configurations_of_their_own(kind: str, reserved: int) -> None:
    """The input is as long as the encoder reads, which is another model; RoBERTa's first tokens have position 2."""
    config = getattr(transformers, f"{kind}Config")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    both = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(
        config(vocab_size=VOCABULARY, max_position_embeddings=40, **sizes),
        config(vocab_size=VOCABULARY, max_position_embeddings=24, **sizes),
    )
    model = transformers.EncoderDecoderModel(config=both).eval()
    model.generation_config.decoder_start_token_id = 3
    llm, longest = LLM(model, drafter="plain"), 40 - reserved
    text = llm.generate([5] * longest, max_new_tokens=99, ignore_eos=True)
    assert (len(text.tokens), text.finish_reason) == (24 - reserved - 1, "length")
    with pytest.raises(ContextOverflow, match=f"{longest + 1} tokens and the context of .* {longest};"):
        llm.generate([5] * (longest + 1))


@pytest.mark.parametrize("drafter", ["plain", "auto", "prompt_lookup", "jacobi"])
def test_an_encoder_and_a_decoder_with_vocabularies_of_their_own(drafter: str, tmp_path: Path) -> None:
    """Tokens of the input mean nothing to the decoder, so nothing is copied from it."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    both = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(
        transformers.BertConfig(vocab_size=2 * VOCABULARY, **sizes),
        transformers.BertConfig(vocab_size=VOCABULARY, **sizes),
    )
    torch.manual_seed(0)
    model = transformers.EncoderDecoderModel(config=both).eval()
    model.generation_config.decoder_start_token_id = 3
    prompt, options = [VOCABULARY + 3] * 8, {"max_new_tokens": 24, "ignore_eos": True}
    own = own_text(model, prompt, 24, eos_token_id=-1)
    with LLM(model, drafter=drafter) as llm:
        assert llm.generate(prompt, **options).tokens == own
        with pytest.raises(BadParameter, match=f"{2 * VOCABULARY} is outside the vocabulary of {2 * VOCABULARY}"):
            llm.generate([2 * VOCABULARY])
        llm.save_drafter_cache(tmp_path / "cache.npz")
    with LLM(model, drafter=drafter, drafter_cache=tmp_path / "cache.npz") as llm:
        assert llm.generate(prompt, **options).tokens == own
    inputs = {"input_ids": torch.tensor([prompt]), "attention_mask": torch.ones(1, len(prompt))}
    found = hf.run(model, **inputs, drafter=drafter, max_new_tokens=24, eos_token_id=-1, pad_token_id=0)
    assert found[0].tolist()[1:] == own


def test_short_inputs_do_not_change_how_long_ones_are_encoded() -> None:
    """BigBird-Pegasus leaves block-sparse attention for good where an input is short, as those of the self-test are."""
    sizes = {"block_size": 4, "num_random_blocks": 1, "encoder_layers": 1, "decoder_layers": 1}
    config = transformers.BigBirdPegasusConfig(**{**BART, **sizes}, decoder_start_token_id=2)
    torch.manual_seed(1)
    model = sharpen(transformers.AutoModelForSeq2SeqLM.from_config(config).eval())
    (prompt,), options = sources(4)[3:], {"max_new_tokens": 8, "ignore_eos": True}
    own = own_text(copy.deepcopy(model), prompt, 8, eos_token_id=-1)
    llm = LLM(model, drafter="plain")
    assert [each.tokens for each in llm.generate([[5, 6], prompt], **options)][1] == own


# ------------------------------------------------------------------------------------------------------- refusals


def test_what_is_refused(llms: dict[str, LLM], tmp_path: Path) -> None:
    llm = llms["marian"]
    with pytest.raises(ContextOverflow, match=r"has 97 tokens and the context of .* 96"):
        llm.generate([3] * 97)
    with pytest.raises(BadParameter, match="need a tokenizer"):
        llm.generate([{"role": "user", "content": "hello"}])
    with pytest.raises(BadParameter, match="outside the vocabulary"):
        llm.generate([3, VOCABULARY])
    with pytest.raises(Refused, match="exact mode"):
        LLM(build("t5"), exact=True)
    with pytest.raises(Refused, match="encoder-decoder model; draft with a smaller"):
        LLM(build("t5"), drafter="draft_model", draft="self:int8")
    with pytest.raises(Refused, match=r"the head .* cannot draft for .*, an encoder-decoder model; leave out the"):
        LLM(build("t5"), head="bundled")
    with pytest.raises(Refused, match=r"'triforce' is not possible with .*drafter='draft_model'"):
        LLM(build("t5"), drafter="triforce")
    with pytest.raises(Refused, match="use a draft model of the same kind"):
        LLM(build("t5"), drafter="draft_model", draft="bundled")
    with pytest.raises(Refused, match="new_target"):
        TransformersTarget(build("t5"))
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 40, "pad_token_id": 0}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_mel_bins": 4, "max_source_positions": 10}
    listener = transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(**sizes, **heads, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3)
    )
    with pytest.raises(Refused, match="reads input_features, and leapahead gives encoders token ids"):
        new_target(listener)
    with pytest.raises(Refused, match="reads input_features, and leapahead gives encoders token ids"):
        hf.run(listener, input_features=torch.zeros(1, 4, 20), max_new_tokens=4)
    listener.save_pretrained(tmp_path)
    with pytest.raises(Refused, match=r"an encoder-decoder model \(whisper\) of which Transformers has no class"):
        LLM(str(tmp_path))
    config = transformers.SwitchTransformersConfig(**T5, num_experts=2, expert_capacity=24)
    with pytest.raises(Refused, match="leave out tokens of a forward that come behind the first 24 of an expert"):
        LLM(transformers.SwitchTransformersForConditionalGeneration(config).eval())
    without = build("t5")
    without.config.decoder_start_token_id = without.generation_config.decoder_start_token_id = None
    without.config.bos_token_id = without.generation_config.bos_token_id = None
    with pytest.raises(Refused, match="which token its texts begin with"):
        new_target(without)
    without = build("t5")
    without.generation_config.begin_suppress_tokens = [3]
    with pytest.raises(Refused, match="begin_suppress_tokens"):
        new_target(without)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("decoder_start_token_id", 99999),
        ("forced_bos_token_id", 99999),
        ("forced_bos_token_id", "x"),
        ("forced_eos_token_id", [1, -1]),
        ("suppress_tokens", [3, 99999]),
        ("bad_words_ids", [[3], [99999]]),
        ("bad_words_ids", [[]]),
    ],
)
def test_tokens_of_a_configuration_outside_the_vocabulary_are_refused_by_name(name: str, value: Any) -> None:
    model = build("t5")
    setattr(model.generation_config, name, value)
    with pytest.raises(BadParameter, match=rf"^{name}=.* of the model's configuration is not possible: "):
        new_target(model)


@pytest.mark.slow
def test_a_text_ends_at_the_end_of_the_context(llms: dict[str, LLM]) -> None:
    """Nodes behind the last position are never given to the model."""
    target, prompt = llms["bart"].target, sources()[0]
    stop = StopParams(max_new_tokens=200)
    engine = Engine(target)
    texts = []
    for drafter in (engine.drafter("plain"), engine.drafter(PerSequence(lambda: RandomTrees(1, nodes=40, depth=9)))):
        engine.run([handle := engine.submit(Request(prompt, drafter, stop=stop))])
        texts.append(handle.tokens)
    assert texts[0] == texts[1]
    assert 1 + len(texts[0]) <= 97


def test_half_precision() -> None:
    for name in ("t5", "bart"):
        target = new_target(build(name, torch.bfloat16))
        assert target.info.capabilities >= {CHAIN, TREE}


# ------------------------------------------------------------------------------------------- Transformers' generate


def _batch(rows: list[list[int]], left: bool = False) -> dict[str, torch.Tensor]:
    longest = max(map(len, rows))
    pads = [[0] * (longest - len(row)) for row in rows]
    both = [
        (pad + row, pad + [1] * len(row)) if left else (row + pad, [1] * len(row) + pad)
        for row, pad in zip(rows, pads, strict=True)
    ]
    return {
        "input_ids": torch.tensor([ids for ids, _ in both]),
        "attention_mask": torch.tensor([mask for _, mask in both]),
    }


def _both(model: Any, inputs: Any, drafter: str = "lookahead", **options: Any) -> tuple[Any, Any]:
    options = {"max_new_tokens": 16, "num_beams": 1, **options}
    with torch.no_grad():
        own = model.generate(**inputs, **options)
        ours = model.generate(**inputs, custom_generate=hf.generate, drafter=drafter, **options)
    return own, ours


@pytest.mark.parametrize("name", ["t5", *(pytest.param(each, marks=pytest.mark.slow) for each in TREES[2:])])
def test_generate_of_transformers(name: str) -> None:
    model, prompts = build(name), sources()
    for left in (False, True):
        own, ours = _both(model, _batch(prompts, left))
        assert torch.equal(own, ours)
    own, ours = _both(model, {**_batch(prompts), "labels": torch.full((len(prompts), 2), 20)})  # of a trainer
    assert torch.equal(own, ours)
    own, ours = _both(model, _batch(prompts[:2]), "suffix", repetition_penalty=1.2, no_repeat_ngram_size=3)
    assert torch.equal(own, ours)
    begin = torch.tensor([[int(own[0, 0]), 20, 21]])
    own, ours = _both(model, _batch(prompts[:1]), "auto", decoder_input_ids=begin)
    assert torch.equal(own, ours)


def test_generate_bans_first_tokens_as_configured() -> None:
    """Which `LLM` refuses, and Transformers does itself here."""
    model, inputs = build("t5"), _batch(sources(2))
    first, _ = _both(build("t5"), inputs)
    model.generation_config.begin_suppress_tokens = [int(first[0, 1])]
    own, ours = _both(model, inputs)
    assert torch.equal(own, ours)
    assert int(own[0, 1]) != int(first[0, 1])


def test_generate_refuses_encoders_of_speech_by_name() -> None:
    """Also where there is a mask, which is of frames, of which the encoder gives fewer."""
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 40, "input_feat_per_channel": 4}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    listener = transformers.Speech2TextForConditionalGeneration(
        transformers.Speech2TextConfig(**sizes, **heads, conv_channels=16, decoder_start_token_id=3)
    ).eval()
    given = {"input_features": torch.zeros(1, 20, 4), "attention_mask": torch.ones(1, 20, dtype=torch.long)}
    with pytest.raises(Refused, match="reads input_features, and leapahead gives encoders token ids"):
        listener.generate(**given, custom_generate=hf.generate, max_new_tokens=4)
    model = build("t5")
    with torch.no_grad():
        states = model.get_encoder()(**_batch(sources(1)))
    mask = torch.ones(1, 9, dtype=torch.long)
    with pytest.raises(Refused, match=r"an attention_mask of shape \(1, 9\) for an encoder.s output"):
        hf.run(model, encoder_outputs=states, attention_mask=mask, max_new_tokens=4)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # PEFT uses it
def test_run_takes_models_with_adapters() -> None:
    """Whose `generate` takes no argument by position."""
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(task_type="SEQ_2_SEQ_LM", target_modules=["q", "v"], init_lora_weights=False)
    model, inputs = peft.get_peft_model(build("t5"), settings).eval(), _batch(sources(2))
    options = {"max_new_tokens": 16, "num_beams": 1}
    with torch.no_grad():
        own = model.generate(**inputs, **options)
    assert torch.equal(hf.run(model, **inputs, drafter="lookahead", **options), own)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    assert torch.equal(hf.run(model, ids, attention_mask=mask, drafter="lookahead", **options), own)


def test_run_takes_models_whose_generate_has_no_inputs() -> None:
    """Those of SeamlessM4T begin with `input_ids`."""
    sizes = {f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    sizes |= {"vocab_size": VOCABULARY, "hidden_size": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    tokens = {"bos_token_id": 2, "decoder_start_token_id": 3, "eos_token_id": 3, "pad_token_id": 0}
    torch.manual_seed(0)
    config = transformers.SeamlessM4Tv2Config(**sizes, **tokens, max_position_embeddings=64)
    model = transformers.SeamlessM4Tv2ForTextToText(config).eval()
    model.generation_config.text_decoder_lang_to_code_id = {"fra": 5}
    ids, options = torch.tensor(sources(1)), {"tgt_lang": "fra", "max_new_tokens": 12, "min_new_tokens": 12}
    own = model.generate(ids, **options)
    assert own.shape == (1, 14)
    assert torch.equal(hf.run(model, ids, drafter="prompt_lookup", **options), own)
    assert torch.equal(hf.run(model, input_ids=ids, drafter="prompt_lookup", **options), own)
    with pytest.raises(TypeError, match="multiple values for keyword argument 'input_ids'"):
        hf.run(model, ids, input_ids=ids, **options)


@pytest.mark.slow
def test_generate_keeps_scores_and_takes_encoder_outputs() -> None:
    model, prompts = build("t5"), sources()
    options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    own, ours = _both(model, _batch(prompts[:3]), **options, encoder_repetition_penalty=1.3)
    assert type(own) is type(ours)
    assert torch.equal(own.sequences, ours.sequences)
    for mine, theirs in zip((*ours.scores, *ours.logits), (*own.scores, *own.logits), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-4)
    with torch.no_grad():
        states = model.get_encoder()(**_batch(prompts[:1]))
    own, ours = _both(model, {"encoder_outputs": states}, "prompt_lookup")
    assert torch.equal(own, ours)
    samples = [
        model.generate(
            **_batch(prompts[:2]),
            custom_generate=hf.generate,
            drafter=drafter,
            do_sample=True,
            num_return_sequences=2,
            seed=4,
            max_new_tokens=12,
        )
        for drafter in ("plain", "suffix")
    ]
    assert torch.equal(*samples)
    with pytest.raises(Refused, match="num_beams"):
        hf.run(model, **_batch(prompts[:1]), num_beams=2, max_new_tokens=4)
    with pytest.raises(BadParameter, match="all padding"):
        hf.run(model, input_ids=torch.tensor([[5]]), attention_mask=torch.tensor([[0]]), max_new_tokens=4)
