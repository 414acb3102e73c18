"""`leapahead.hf` gives what Transformers' own `generate` gives, on tiny random models.

Greedy text is compared token for token with Transformers. Sampled text cannot be, since random numbers are used in
another order: its scores and its distribution are compared with Transformers, and its text with plain decoding.
"""

from __future__ import annotations

import copy
import gc
import inspect
import itertools
import os
import shutil
import subprocess
import sys
import threading
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import mostly_slow
from scipy.stats import chisquare
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GenerationConfig,
    GPT2Config,
    GPTNeoConfig,
    LlamaConfig,
    LlamaModel,
    MambaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    SynthIDTextWatermarkingConfig,
    TextIteratorStreamer,
    TextStreamer,
    WatermarkingConfig,
    set_seed,
)
from transformers.generation import logits_process
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList, StopStringCriteria
from transformers.generation.streamers import BaseStreamer

from leapahead import LLM, Budget, DrafterCache, Proposal, SequenceDrafter, SequenceView, Stats, TokenTree
from leapahead.core.errors import BadParameter, ContextOverflow, Refused
from leapahead.core.forks import Mutex
from leapahead.core.text import fingerprint
from leapahead.drafters import registry
from leapahead.drafters.base import Drafter
from leapahead.integrations import hf, hf_engine, hf_fields

VOCAB = 96
PAD = 0
HUB_FOLDER = Path(hf.__file__).parent  # holds custom_generate/generate.py

DRAFTERS = registry.ready()
OPTIONS: dict[str, dict[str, Any]] = {
    "auto": {"nodes": 6},  # whatever they cost
    "lookahead": {"window": 5, "ngram": 3, "guesses": 4},
    "jacobi": {"block": 4},
}


def tiny(kind: str, vocab: int = VOCAB, seed: int = 0) -> Any:
    """A random model whose greedy text is neither constant nor without repetition."""
    torch.manual_seed(seed)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokens = {"vocab_size": vocab, "bos_token_id": None, "eos_token_id": None, "pad_token_id": PAD}
    common = {"max_position_embeddings": 128, "initializer_range": 0.25, "tie_word_embeddings": False}
    configs: dict[str, Any] = {
        "llama": lambda: LlamaConfig(**shape, num_key_value_heads=2, **tokens, **common),
        "qwen2": lambda: Qwen2Config(**shape, num_key_value_heads=2, **tokens, **common),
        "gpt2": lambda: GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=128, **tokens, initializer_range=0.25),
        "gpt_neo": lambda: GPTNeoConfig(
            hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], **tokens, **common
        ),
        "mamba": lambda: MambaConfig(
            hidden_size=32, num_hidden_layers=2, state_size=8, initializer_range=0.25, **tokens
        ),
    }
    return AutoModelForCausalLM.from_config(configs[kind]()).eval()


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny("llama")


def padded(*lengths: int, seed: int = 1) -> dict[str, torch.Tensor]:
    """A batch of random prompts of these lengths, padded on the left."""
    rng = np.random.default_rng(seed)
    ids = torch.full((len(lengths), max(lengths)), PAD)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, max(lengths) - length :] = torch.from_numpy(rng.integers(3, VOCAB, length))
        mask[row, max(lengths) - length :] = 1
    return {"input_ids": ids, "attention_mask": mask}


SINGLE, BATCH = padded(9), padded(4, 11, 7)
LENGTH = BATCH["input_ids"].shape[1]


def theirs(model: Any, inputs: dict[str, Any], **options: Any) -> Any:
    return model.generate(**inputs, **({"max_new_tokens": 20} | options))


def ours(
    model: Any, inputs: dict[str, Any], drafter: str | type[Drafter | SequenceDrafter] = "plain", **options: Any
) -> Any:
    tuned = OPTIONS.get(drafter, {}) if isinstance(drafter, str) else {}
    options = {"max_new_tokens": 20, "drafter": drafter} | tuned | options
    return model.generate(**inputs, custom_generate=hf.generate, **options)


def run(model: Any, inputs: dict[str, Any], **options: Any) -> Any:
    return hf.run(model, **inputs, **({"max_new_tokens": 20} | options))


def common_token(model: Any, inputs: dict[str, Any], new: int = 24) -> int:
    """A token that ends the greedy texts of a batch at different places."""
    texts = theirs(model, inputs, max_new_tokens=new)[:, inputs["input_ids"].shape[1] :].tolist()
    where = {t: {row.index(t) if t in row else new for row in texts} for t in {t for row in texts for t in row}}
    return max(where, key=lambda t: (len(where[t]), -max(where[t])))


@pytest.fixture(scope="module")
def eos(llama: Any) -> int:
    return common_token(llama, BATCH)


# ------------------------------------------------------------------------------------------------------------- greedy


@pytest.mark.parametrize("drafter", mostly_slow(DRAFTERS, *DRAFTERS[:4]))
def test_greedy_text_is_that_of_transformers(llama: Any, eos: int, drafter: str) -> None:
    stats: list[Stats] = []
    for inputs, options in [(SINGLE, {}), (BATCH, {"eos_token_id": [eos, 5], "pad_token_id": 2})]:
        expected = theirs(llama, inputs, max_new_tokens=40, **options)
        assert ours(llama, inputs, drafter, max_new_tokens=40, stats=stats, **options).tolist() == expected.tolist()
    assert len(stats) == 4
    assert any(each.accepted for each in stats) == (drafter != "plain")


@pytest.mark.parametrize("kind", ["gpt2", "qwen2"])
def test_other_families(kind: str) -> None:
    model = tiny(kind)
    options = {"eos_token_id": common_token(model, BATCH), "max_new_tokens": 40}
    assert ours(model, BATCH, "lookahead", **options).tolist() == theirs(model, BATCH, **options).tolist()


def test_defaults_and_config_objects(llama: Any, eos: int) -> None:
    with pytest.warns(UserWarning, match="max_length"):  # Transformers warns that it takes 20 new tokens
        expected = llama.generate(**SINGLE)
    with pytest.warns(UserWarning, match="max_length"):
        assert llama.generate(**SINGLE, custom_generate=hf.generate).tolist() == expected.tolist()
    config = GenerationConfig(max_length=30, eos_token_id=eos, pad_token_id=PAD)
    expected = llama.generate(**SINGLE, generation_config=config)
    assert llama.generate(**SINGLE, generation_config=config, custom_generate=hf.generate).tolist() == expected.tolist()
    for options in [{"use_cache": False}, {"cache_implementation": "static"}, {"max_new_tokens": 1}]:
        assert ours(llama, BATCH, "lookahead", **options).tolist() == theirs(llama, BATCH, **options).tolist()


def test_modes_of_torch_are_those_of_transformers() -> None:
    model, inputs = tiny("llama"), padded(5)
    for mode in (nullcontext(), torch.autocast("cpu", torch.bfloat16), torch.inference_mode(), nullcontext()):
        with mode:
            assert ours(model, inputs, "suffix").tolist() == theirs(model, inputs).tolist()


def test_the_default_is_auto(llama: Any) -> None:
    stats: list[Stats] = []
    options: dict[str, Any] = {"sources": "suffix,recycling", "nodes": 5, "stats": stats, "max_new_tokens": 20}
    text = llama.generate(**BATCH, custom_generate=hf.generate, **options)
    assert text.tolist() == theirs(llama, BATCH).tolist()
    assert {"suffix", "recycling"} <= {source for each in stats for source in each.drafter}
    assert sum(each.drafted for each in stats) > 0
    assert run(llama, BATCH).tolist() == text.tolist()


@pytest.mark.slow
def test_models_without_trees_refuse_by_name() -> None:
    """A recurrent state cannot discard rejected tokens; gpt_neo's attention can be given chains only."""
    mamba, neo = tiny("mamba"), tiny("gpt_neo")
    stats: list[Stats] = []
    with pytest.warns(UserWarning, match="'auto' cannot draft for this target"):
        mamba.generate(**SINGLE, custom_generate=hf.generate, max_new_tokens=2)
    for inputs in [SINGLE, BATCH]:
        text = mamba.generate(**inputs, custom_generate=hf.generate, max_new_tokens=20, stats=stats)
        assert text.tolist() == theirs(mamba, inputs).tolist()
    assert not any(each.drafted for each in stats)
    assert ours(neo, BATCH, "jacobi").tolist() == theirs(neo, BATCH).tolist()
    for model, drafter in [(mamba, "jacobi"), (mamba, "recycling"), (neo, "lookahead")]:
        with pytest.raises(Refused, match=drafter):
            ours(model, SINGLE, drafter)


def test_padding_is_inferred_as_in_transformers(llama: Any) -> None:
    inputs = {"input_ids": BATCH["input_ids"]}  # no mask: pads are recognised by their id
    assert ours(llama, inputs).tolist() == theirs(llama, BATCH).tolist()
    mask = BATCH["attention_mask"]
    positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)  # whatever stands at the padding
    assert ours(llama, {**BATCH, "position_ids": positions}).tolist() == theirs(llama, BATCH).tolist()


@pytest.mark.slow
def test_float64_chooses_in_float32_like_transformers() -> None:
    model = tiny("llama").double()
    first = int(theirs(model, SINGLE)[0, SINGLE["input_ids"].shape[1]])
    with torch.no_grad():  # the last token's logit is larger, by less than float32 can tell
        model.lm_head.weight[VOCAB - 1] = model.lm_head.weight[first] * (1 + 1e-12)
    assert ours(model, SINGLE).tolist() == theirs(model, SINGLE).tolist()
    options = {"max_new_tokens": 30, "repetition_penalty": 1.2}
    assert ours(model, BATCH, "lookahead", **options).tolist() == theirs(model, BATCH, **options).tolist()


def test_predictions(llama: Any) -> None:
    """Token ids, one prediction for all rows or one for each. A drafter that makes no use of them is refused."""
    expected = theirs(llama, BATCH)
    stats: list[Stats] = []
    new = expected[:, LENGTH:]
    for given in [new, [*new.tolist()[:2], None]]:
        text = ours(llama, BATCH, "prediction", prediction=given, stats=stats)
        assert text.tolist() == expected.tolist()
    assert all(each.steps <= 4 for each in stats[:5])
    assert stats[5].accepted == 0
    assert ours(llama, BATCH, "auto", prediction=new[0].tolist()).tolist() == expected.tolist()
    with pytest.raises(BadParameter, match="'suffix' makes no use of a prediction"):
        ours(llama, SINGLE, "suffix", prediction=[4, 5])
    with pytest.raises(BadParameter, match="2 predictions for 1 prompt is not possible"):
        ours(llama, SINGLE, "prediction", prediction=[[4], [5]])
    with pytest.raises(BadParameter, match=r"stats=\(\) is not possible: it must be a list"):
        ours(llama, SINGLE, "auto", stats=())


# --------------------------------------------------------------------------------------------------------- processors


class NoTokenTwiceIn(LogitsProcessor):
    """A user's own: bans the last few tokens, and raises one token that depends on the whole prefix."""

    def __init__(self, last: int = 3) -> None:
        self.last = last

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.scatter(1, input_ids[:, -self.last :], -torch.inf)
        scores.scatter_add_(1, input_ids.sum(dim=1, keepdim=True) % scores.shape[1], torch.full_like(scores, 3.0))
        return scores


class InPlace(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, input_ids.shape[1] % scores.shape[1]] += 4.0
        return scores


PROCESSORS: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.4},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.5},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "encoder_no_repeat_ngram_size": {  # with a bias to the prompts' tokens, each banned in its own row only
        "encoder_no_repeat_ngram_size": 1,
        "sequence_bias": [[[t], 7.0 + t / 50] for t in sorted(set(BATCH["input_ids"].flatten().tolist()))],
    },
    "bad_words_ids": {"bad_words_ids": [*([t] for t in range(3, 30)), *([t, t + 1 - t % 2] for t in range(96))]},
    "min_new_tokens": {"min_new_tokens": 11},
    "min_length": {"min_length": 17},
    "suppress_tokens": {"suppress_tokens": list(range(20, 60))},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(30, 96))},
    "forced_eos_token_id": {"forced_eos_token_id": 7, "eos_token_id": None},
    "sequence_bias": {"sequence_bias": [[[t], 1.5] for t in range(5, 15)] + [[[8, t], 4.0] for t in range(20, 40)]},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (4, 1.5)},
    "remove_invalid_values": {"remove_invalid_values": True},
    "renormalize_logits": {"renormalize_logits": True},
    "watermarking_config": {"watermarking_config": WatermarkingConfig(bias=2.5, seeding_scheme="lefthash")},
    "watermark by selfhash": {"watermarking_config": WatermarkingConfig(bias=2.5, seeding_scheme="selfhash")},
    "prefix_allowed_tokens_fn": {
        "prefix_allowed_tokens_fn": lambda row, prefix: list(range(3 + row, 96, 2 + (len(prefix) + row) % 2))
    },
    "own": {"logits_processor": LogitsProcessorList([NoTokenTwiceIn()])},
    "in place": {"logits_processor": LogitsProcessorList([InPlace()])},
    "several": {
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3,
        "suppress_tokens": [8, 9],
        "min_new_tokens": 5,
        "logits_processor": LogitsProcessorList([NoTokenTwiceIn(2)]),
        "renormalize_logits": True,
    },
}
SOME_PROCESSORS = ("repetition_penalty", "bad_words_ids", "several", "own")


@pytest.mark.parametrize("name", mostly_slow(PROCESSORS, *SOME_PROCESSORS))
def test_every_processor_sees_its_own_prefix(llama: Any, eos: int, name: str) -> None:
    options = {"eos_token_id": eos, "max_new_tokens": 24}
    unprocessed = theirs(llama, BATCH, **options).tolist()
    options |= PROCESSORS[name]
    expected = theirs(llama, BATCH, **options).tolist()
    assert (expected == unprocessed) == (name in ("remove_invalid_values", "renormalize_logits"))
    for drafter in ["lookahead", "auto"] if name in ("own", "several") else ["lookahead"]:
        assert ours(llama, BATCH, drafter, **options).tolist() == expected


def test_allowed_tokens_of_several_samples_are_those_of_their_prompt(llama: Any) -> None:
    def allowed(prompt: int, prefix: torch.Tensor) -> list[int]:
        return list(range(5 + 30 * prompt, 30 + 30 * prompt))

    options = {"do_sample": True, "num_return_sequences": 3, "seed": 5, "prefix_allowed_tokens_fn": allowed}
    plain = ours(llama, BATCH, **options)
    for row, text in enumerate(plain[:, LENGTH:].tolist()):
        assert set(text) <= set(allowed(row // 3, plain[row]))
    assert ours(llama, BATCH, "lookahead", **options).tolist() == plain.tolist()


def test_forced_bos(llama: Any) -> None:
    inputs = {"input_ids": torch.tensor([[5]])}
    expected = theirs(llama, inputs, forced_bos_token_id=7, max_new_tokens=6).tolist()
    assert expected[0][1] == 7
    assert ours(llama, inputs, "lookahead", forced_bos_token_id=7, max_new_tokens=6).tolist() == expected


# ----------------------------------------------------------------------------------------------------------- sampling

WARPERS: list[dict[str, Any]] = [
    {"top_k": 0},
    {"top_k": 0, "temperature": 0.7},
    {"top_k": 9, "temperature": 1.7},
    {"top_k": 0, "top_p": 0.6, "temperature": 1.3},
    {"top_k": 0, "min_p": 0.1, "temperature": 0.5},
    {"top_k": 0, "typical_p": 0.7},
    {"top_k": 0, "epsilon_cutoff": 0.02, "temperature": 2.0},
    {"top_k": 0, "eta_cutoff": 0.02},
    {"top_k": 0, "top_h": 0.4},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.02, "temperature": 0.8, "renormalize_logits": True},
    {"top_k": 20, "temperature": 0.8, "repetition_penalty": 1.2},
    {"top_k": 0, "temperature": 0.6, "watermarking_config": WatermarkingConfig(bias=2.0)},
    {"top_k": 5, "temperature": 0.8, "logits_processor": LogitsProcessorList([NoTokenTwiceIn()])},
]


@pytest.mark.slow
@pytest.mark.parametrize("options", WARPERS, ids=lambda options: "-".join(options))
def test_sampled_text_and_its_scores(llama: Any, options: dict[str, Any]) -> None:
    """The text is that of plain decoding; scores and logits are those of Transformers after the same prefixes."""
    options = {"do_sample": True, **options}
    report = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    mine = ours(llama, BATCH, "lookahead", seed=5, **options, **report)
    text = mine.sequences
    assert ours(llama, BATCH, "plain", seed=5, **options).tolist() == text.tolist()
    for at in range(0, 20, 4):
        mask = torch.cat([BATCH["attention_mask"], torch.ones_like(text[:, LENGTH : LENGTH + at])], dim=1)
        prefix = {"input_ids": text[:, : LENGTH + at], "attention_mask": mask}
        their = theirs(llama, prefix, **{**options, "max_new_tokens": 1}, **report)
        torch.testing.assert_close(mine.logits[at], their.logits[0], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(mine.scores[at], their.scores[0], atol=1e-3, rtol=1e-3)
        picked = mine.scores[at].gather(1, text[:, LENGTH + at : LENGTH + at + 1])
        assert torch.isfinite(picked).all()


def test_every_temperature_counts_once(llama: Any) -> None:
    """Of several among the user's processors."""
    warmers = [logits_process.TemperatureLogitsWarper(each) for each in (0.5, 0.8)]
    one, several = (
        ours(llama, SINGLE, do_sample=True, top_k=0, seed=2, logits_processor=LogitsProcessorList(each))
        for each in ([logits_process.TemperatureLogitsWarper(0.4)], warmers)
    )
    assert one.tolist() == several.tolist()


@pytest.mark.parametrize("drafter", mostly_slow(DRAFTERS[1:], *DRAFTERS[1:4]))
def test_sampled_text_is_the_same_for_every_drafter(llama: Any, drafter: str) -> None:
    options = {"do_sample": True, "eos_token_id": 11, "top_k": 20, "temperature": 0.8, "repetition_penalty": 1.2}
    for inputs, seed in [(SINGLE, 3), (BATCH, 4)]:
        expected = ours(llama, inputs, "plain", seed=seed, **options).tolist()
        assert ours(llama, inputs, drafter, seed=seed, **options).tolist() == expected


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["plain", "lookahead"])
@pytest.mark.parametrize(
    "options",
    [{"top_k": 0, "temperature": 0.8}, {"top_k": 6, "top_p": 0.9, "temperature": 1.4, "repetition_penalty": 1.3}],
    ids=["temperature", "filters"],
)
def test_distribution_is_that_of_transformers(drafter: str, options: dict[str, Any]) -> None:
    """Pairs of tokens against the probabilities that Transformers samples from; false alarms: 1e-4, seeds fixed."""
    vocab, draws = 10, 2000
    model = tiny("llama", vocab)
    model.config.pad_token_id = model.generation_config.pad_token_id = None
    prompt = torch.tensor([[3, 4, 5, 3, 4]])
    options = {"do_sample": True, **options}
    report = {"return_dict_in_generate": True, "output_scores": True, "max_new_tokens": 1}
    first = theirs(model, {"input_ids": prompt}, **options, **report).scores[0].softmax(-1)[0]
    pairs = {}
    for a in range(vocab):
        longer = {"input_ids": torch.cat([prompt, torch.tensor([[a]])], dim=1)}
        second = theirs(model, longer, **options, **report).scores[0].softmax(-1)[0]
        pairs |= {(a, b): float(first[a] * second[b]) for b in range(vocab)}
    set_seed(0)
    seen: Counter[tuple[int, int]] = Counter()
    for _ in range(draws // 50):
        text = ours(model, {"input_ids": prompt}, drafter, **options, max_new_tokens=2, num_return_sequences=50)
        seen.update(tuple(row) for row in text[:, prompt.shape[1] :].tolist())
    assert all(pairs[pair] > 0 for pair in seen)
    often = [pair for pair in pairs if pairs[pair] * draws >= 5]
    observed = [seen[pair] for pair in often] + [sum(n for pair, n in seen.items() if pair not in often)]
    expected = [pairs[pair] * draws for pair in often]
    expected.append(draws - sum(expected))
    if expected[-1] < 5:  # too rare to stand alone
        rest, other = observed.pop(), expected.pop()
        observed[-1], expected[-1] = observed[-1] + rest, expected[-1] + other
    assert chisquare(observed, expected).pvalue > 1e-4


def test_drafters_know_the_temperature(llama: Any) -> None:
    """Wherever Transformers put the temperature among the processors."""
    seen = []

    class Spy(SequenceDrafter):
        name = "spy"

        def begin(self, sequence: SequenceView) -> None:
            noisy, noise = (sequence.scores(50, [7], [logp]) for logp in (1.0, 0.0))
            seen.append(float(1 / (noisy - noise)[0]))

        def propose(self, sequence: SequenceView, budget: Budget) -> Proposal:
            return Proposal(TokenTree.root(sequence.root))

    for temperature, others in itertools.product([0.5, 1.0, 4.0], [{"top_k": 0}, {"top_k": 7, "min_p": 0.01}]):
        ours(llama, SINGLE, Spy, do_sample=True, temperature=temperature, seed=1, max_new_tokens=1, **others)
        assert seen[-1] == pytest.approx(temperature)


def test_seeds(llama: Any) -> None:
    options: dict[str, Any] = {"do_sample": True, "max_new_tokens": 16}
    set_seed(1)
    one, two = (ours(llama, BATCH, num_return_sequences=3, **options) for _ in range(2))
    set_seed(1)
    again = ours(llama, BATCH, "lookahead", num_return_sequences=3, **options)
    assert again.tolist() == one.tolist()  # repeatable, for every drafter
    assert one.tolist() != two.tolist()  # another text at every call
    assert len({tuple(row) for row in one.tolist()}) == 9  # and in every row

    seeded = ours(llama, BATCH, seed=[5, 2**64 - 1, 7], **options)
    for row, seed in enumerate([5, 2**64 - 1, 7]):  # each row is the text of its seed
        ids = BATCH["input_ids"][row][BATCH["attention_mask"][row] == 1][None]
        alone = ours(llama, {"input_ids": ids}, "lookahead", seed=seed, **options)
        assert alone[0, ids.shape[1] :].tolist() == seeded[row, LENGTH:].tolist()
    assert ours(llama, BATCH, seed=5, **options).tolist() == ours(llama, BATCH, seed=[5, 6, 7], **options).tolist()

    state = torch.get_rng_state()
    ours(llama, SINGLE, "lookahead")
    assert torch.equal(state, torch.get_rng_state())  # greedy decoding draws nothing
    for seed in [-1, 2**64, "5", 1.0, True, [1, 2]]:
        with pytest.raises(BadParameter, match="seed"):
            ours(llama, BATCH, seed=seed, do_sample=True)
    numbers = ours(llama, BATCH, seed=np.int64(5), **options)
    assert numbers.tolist() == ours(llama, BATCH, seed=5, **options).tolist()


def test_a_row_that_fails_ends_its_call_while_the_row_before_it_is_decoded(llama: Any) -> None:
    lengths = []

    def processor(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids[0, 0] != PAD:  # the second row has no padding
            raise ZeroDivisionError
        lengths.append(ids.shape[1])
        return scores

    with pytest.raises(ZeroDivisionError):
        ours(llama, BATCH, logits_processor=LogitsProcessorList([processor]), max_new_tokens=60)
    assert max(lengths) < 20


def test_rows_of_a_refused_batch_are_not_decoded(llama: Any) -> None:
    """Where a later row is refused, the next call decodes its own rows alone."""
    called = []

    def criterion(input_ids: torch.Tensor, scores: Any) -> torch.Tensor:
        called.append(len(input_ids[0]))
        return torch.zeros(len(input_ids), dtype=torch.bool)

    with pytest.raises(BadParameter, match="seed=-1"):
        ours(llama, BATCH, seed=[1, 2, -1], do_sample=True, stopping_criteria=StoppingCriteriaList([criterion]))
    full = {"input_ids": torch.ones(2, 128, dtype=torch.int64), "attention_mask": torch.ones(2, 128)}
    full["attention_mask"][0, :100] = 0
    with pytest.raises(ContextOverflow, match="128 tokens"):
        ours(llama, full, stopping_criteria=StoppingCriteriaList([criterion]))
    ours(llama, SINGLE, max_new_tokens=4)
    assert not called


# ----------------------------------------------------------------------------------------------------------- stopping


class StopAtSum(StoppingCriteria):
    """Ends a row by its own tokens alone."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids.sum(dim=1) % 7 == 3


class StopAtScore(StoppingCriteria):
    """Ends a text at its most certain token so far, the first few left aside."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        best = torch.stack(scores).amax(dim=2)  # [tokens, batch]
        return (best[-1] >= best.amax(dim=0)) & (torch.tensor(len(scores)) > 4)


@pytest.mark.parametrize("has_eos", mostly_slow([False, True], True), ids=["without eos", "with eos"])
@pytest.mark.parametrize("inputs", [SINGLE, BATCH, padded(6, 3, 5, 8, 2, seed=9)], ids=["single", "batch", "five"])
def test_criteria_are_called_after_every_token(llama: Any, inputs: dict[str, Any], has_eos: bool) -> None:
    """Without an EOS criterion Transformers lets rows that have ended go on until all have."""
    options: dict[str, Any] = {"eos_token_id": common_token(llama, inputs)} if has_eos else {}
    for criterion in [StopAtSum(), lambda ids, scores: ids.sum(dim=1) % 5 == 1]:
        options |= {"stopping_criteria": StoppingCriteriaList([criterion]), "max_new_tokens": 30}
        expected = theirs(llama, inputs, **options).tolist()
        for drafter in ["lookahead", "recycling"]:
            assert ours(llama, inputs, drafter, **options).tolist() == expected


class StopTracked(StoppingCriteria):
    """As the criteria of lm-eval: with a state for each row of the batch, it ends all rows at once."""

    def __init__(self, rows: int) -> None:
        self.done = [False] * rows

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> bool:
        for row, done in enumerate(self.done):
            self.done[row] = done or int(input_ids[row, LENGTH:].sum()) % 7 == 3
        return all(self.done)


@pytest.mark.parametrize("has_eos", [False, True], ids=["without eos", "with eos"])
@pytest.mark.parametrize(
    "criterion",
    [lambda: StopTracked(2), lambda: lambda ids, scores: bool(ids[0, -1] % 5 == 1)],
    ids=["state", "first row"],
)
def test_criteria_see_all_rows(llama: Any, criterion: Any, has_eos: bool) -> None:
    options: dict[str, Any] = {"return_dict_in_generate": True, "output_scores": True, "max_new_tokens": 30}
    options |= {"eos_token_id": common_token(llama, BATCH)} if has_eos else {}
    their = theirs(llama, BATCH, stopping_criteria=StoppingCriteriaList([criterion()]), **options)
    assert LENGTH + 1 < their.sequences.shape[1] < LENGTH + 30
    for drafter in ["plain", "lookahead"]:
        found = ours(llama, BATCH, drafter, stopping_criteria=StoppingCriteriaList([criterion()]), **options)
        assert found.sequences.tolist() == their.sequences.tolist()
        assert torch.allclose(torch.stack(found.scores), torch.stack(their.scores), atol=1e-4)


def test_criteria_may_read_scores(llama: Any) -> None:
    options: dict[str, Any] = {"return_dict_in_generate": True, "output_scores": True, "max_new_tokens": 30}
    options["stopping_criteria"] = StoppingCriteriaList([StopAtScore()])
    their = theirs(llama, SINGLE, **options)
    assert their.sequences.shape[1] < SINGLE["input_ids"].shape[1] + 30
    assert ours(llama, SINGLE, "lookahead", **options).sequences.tolist() == their.sequences.tolist()


def test_max_time(llama: Any) -> None:
    assert ours(llama, BATCH, max_time=0.0).shape[1] == LENGTH + 1
    assert ours(llama, BATCH, "lookahead", max_time=60.0).tolist() == theirs(llama, BATCH, max_time=60.0).tolist()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Byte-level BPE whose tokens are mostly one to three characters."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=["<pad>", "<s>", "</s>"], show_progress=False, initial_alphabet=[]
    )
    bpe.train_from_iterator(["the cat sat on the mat, the dog lay in the sun; cats and dogs and the sea"] * 3, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    fast.padding_side = "left"
    return fast


def encoded(tokenizer: Any, *texts: str) -> dict[str, torch.Tensor]:
    inputs = tokenizer(list(texts), return_tensors="pt", padding=True)
    return {name: inputs[name] for name in ("input_ids", "attention_mask")}


def only_text(tokenizer: Any, new: int = 14) -> dict[str, Any]:
    """Options under which every new token has text."""
    return {"max_new_tokens": new, "suppress_tokens": [0, 1, 2, *range(len(tokenizer), VOCAB)]}


def test_a_prediction_as_text_is_encoded_by_the_given_tokenizer(llama: Any, tokenizer: Any) -> None:
    inputs, options = encoded(tokenizer, "the cat", "the dog"), only_text(tokenizer)
    expected, stats = theirs(llama, inputs, **options), list[Stats]()
    text = tokenizer.decode(expected[0, inputs["input_ids"].shape[1] :])
    options |= {"tokenizer": tokenizer, "drafter": "prediction", "stats": stats}
    for prediction in (text, [text, None]):
        assert run(llama, inputs, prediction=prediction, **options).tolist() == expected.tolist()
    assert stats[0].accepted == stats[2].accepted > 0 == stats[3].accepted


def test_a_prediction_as_text_is_refused_where_transformers_keeps_the_tokenizer(llama: Any, tokenizer: Any) -> None:
    inputs = encoded(tokenizer, "the cat")
    with pytest.raises(BadParameter, match=r"keeps from custom_generate; call leapahead\.hf\.run with tokenizer="):
        llama.generate(
            **inputs, max_new_tokens=2, custom_generate=hf.generate, prediction=[None, "a"], tokenizer=tokenizer
        )


@pytest.mark.slow
def test_stop_strings_at_every_offset(llama: Any, tokenizer: Any) -> None:
    """Strings that begin in one token and end inside another: half of them escape Transformers' assisted decoding."""
    inputs, options = encoded(tokenizer, "the cat"), only_text(tokenizer)
    text = tokenizer.decode(theirs(llama, inputs, **options)[0, inputs["input_ids"].shape[1] :])
    assert len(text) > 12
    strings = sorted({text[i : i + n] for i in range(len(text)) for n in (1, 2, 3, 5)})
    ends = set()
    for given in [*([each] for each in strings[::4]), sorted(strings, key=len)[-2:]]:
        expected = theirs(llama, inputs, stop_strings=given, tokenizer=tokenizer, **options)
        mine = run(llama, inputs, drafter="lookahead", stop_strings=given, tokenizer=tokenizer, **options)
        assert mine.tolist() == expected.tolist()
        ends.add(expected.shape[1])
    assert len(ends) > 4


def test_stop_strings_in_a_batch_and_in_configs(llama: Any, tokenizer: Any) -> None:
    inputs, base = encoded(tokenizer, "the cat", "the dog lay in", "sea"), only_text(tokenizer, 20)
    text = tokenizer.decode(theirs(llama, inputs, **base)[1, inputs["input_ids"].shape[1] :])
    strings = [text[5:8], text[9:10]]
    expected = theirs(llama, inputs, stop_strings=strings, tokenizer=tokenizer, **base).tolist()
    assert run(llama, inputs, stop_strings=strings, tokenizer=tokenizer, **base).tolist() == expected
    own = {"stopping_criteria": StoppingCriteriaList([StopStringCriteria(tokenizer, text[5:8])]), **base}
    expected_own = theirs(llama, inputs, stop_strings=text[3], tokenizer=tokenizer, **own).tolist()
    assert run(llama, inputs, stop_strings=text[3], tokenizer=tokenizer, **own).tolist() == expected_own
    config = GenerationConfig(stop_strings=strings, pad_token_id=PAD, **base)
    assert hf.run(llama, **inputs, generation_config=config, tokenizer=tokenizer).tolist() == expected
    assert config.stop_strings == strings
    llama.generation_config.stop_strings = strings
    try:
        assert run(llama, inputs, tokenizer=tokenizer, **base).tolist() == expected
        with pytest.raises(BadParameter, match="tokenizer"):
            run(llama, inputs, **base)
    finally:
        llama.generation_config.stop_strings = None


def test_the_context_ends_a_text_with_a_warning() -> None:
    model = tiny("gpt2")
    inputs = padded(120)
    with pytest.warns(UserWarning, match="reached 128 tokens"):
        text = ours(model, inputs, "lookahead", max_new_tokens=50)
    assert text.shape[1] == 128
    assert text.tolist() == theirs(model, inputs, max_new_tokens=8).tolist()


# ------------------------------------------------------------------------------------------------------------- output


@pytest.mark.parametrize("drafter", ["plain", "lookahead", "auto"])
def test_return_dict(llama: Any, eos: int, drafter: str) -> None:
    """Scores and logits of every token, those behind the end of a row among them."""
    options: dict[str, Any] = {"eos_token_id": eos, "repetition_penalty": 1.1, "return_dict_in_generate": True}
    options |= {"output_scores": True, "output_logits": True}
    mine, their = ours(llama, BATCH, drafter, **options), theirs(llama, BATCH, **options)
    assert type(mine) is type(their)
    assert mine.sequences.tolist() == their.sequences.tolist()
    assert len(mine.scores) == len(mine.logits) == len(their.scores)
    for mine_each, their_each in [(mine.scores, their.scores), (mine.logits, their.logits)]:
        assert isinstance(mine_each, tuple)
        torch.testing.assert_close(torch.stack(mine_each), torch.stack(their_each), atol=1e-4, rtol=1e-3)
    assert [*mine] == ["sequences", "scores", "logits"]  # and no cache
    assert mine.attentions is None
    transition = llama.compute_transition_scores(mine.sequences, mine.scores, normalize_logits=True)
    expected = llama.compute_transition_scores(their.sequences, their.scores, normalize_logits=True)
    torch.testing.assert_close(transition, expected, atol=1e-4, rtol=1e-3)


def test_return_dict_has_only_what_was_asked_for(llama: Any) -> None:
    assert list(ours(llama, SINGLE, return_dict_in_generate=True)) == ["sequences"]
    assert list(ours(llama, SINGLE, return_dict_in_generate=True, output_logits=True)) == ["sequences", "logits"]
    assert isinstance(ours(llama, SINGLE, output_scores=True), torch.Tensor)


# ---------------------------------------------------------------------------------------------------------- streamers


class Recorder(BaseStreamer):
    """Records what it receives. Fails at the item of index `fails_at`."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.got: list[Any] = []
        self.fails_at = fails_at

    def put(self, value: torch.Tensor) -> None:
        if len(self.got) == self.fails_at:
            raise OSError("the streamer failed")
        assert value.device.type == "cpu"
        self.got.append(value.tolist())

    def end(self) -> None:
        self.got.append("end")


@pytest.mark.parametrize("has_eos", [False, True], ids=["without eos", "with eos"])
@pytest.mark.parametrize("inputs", [SINGLE, BATCH], ids=["single", "batch"])
def test_streamers_get_what_transformers_gives_them(llama: Any, eos: int, inputs: Any, has_eos: bool) -> None:
    options: dict[str, Any] = {"max_new_tokens": 25, "stopping_criteria": StoppingCriteriaList([StopAtSum()])}
    options |= {"eos_token_id": eos} if has_eos else {}
    expected, direct, through = Recorder(), Recorder(), Recorder()
    theirs(llama, inputs, streamer=expected, **options)
    ours(llama, inputs, "lookahead", leapahead_streamer=direct, **options)
    run(llama, inputs, drafter="recycling", streamer=through, **options)
    assert direct.got == through.got == expected.got


def test_text_streamers(llama: Any, tokenizer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    inputs, base = encoded(tokenizer, "the cat"), only_text(tokenizer, 20)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=30)
    options = {**inputs, "streamer": streamer, "drafter": "lookahead", **base}
    thread = threading.Thread(target=hf.run, args=(llama,), kwargs=options)
    thread.start()
    pieces = list(streamer)
    thread.join()
    expected = tokenizer.decode(theirs(llama, inputs, **base)[0, inputs["input_ids"].shape[1] :])
    assert "".join(pieces) == expected
    assert len([piece for piece in pieces if piece]) > 1
    run(llama, inputs, streamer=TextStreamer(tokenizer, skip_prompt=True), **base)
    assert capsys.readouterr().out.strip() == expected.strip()


def failing(ids: torch.Tensor, scores: Any) -> bool:
    """A criterion that raises after three tokens."""
    if ids.shape[1] > LENGTH + 2:
        raise ZeroDivisionError("the criterion failed")
    return False


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"stopping_criteria": [failing]}, ZeroDivisionError),  # in a row
        ({"num_beams": 2}, Refused),  # in `generate`
        ({"windw": 3}, ValueError),  # in Transformers
        ({"drafter": "lokahead"}, BadParameter),  # in `run`
    ],
)
def test_the_reader_of_a_streamer_never_waits_forever(
    llama: Any, tokenizer: Any, options: dict[str, Any], error: type[Exception]
) -> None:
    streamer = TextIteratorStreamer(tokenizer, timeout=30)
    streamer.put = lambda value: streamer.on_finalized_text(str(value.shape))  # a text streamer takes single rows
    errors: list[BaseException] = []

    def call() -> None:
        try:
            run(llama, BATCH, streamer=streamer, **options)
        except Exception as raised:
            errors.append(raised)

    thread = threading.Thread(target=call)
    thread.start()
    list(streamer)  # ends
    thread.join()
    assert [type(each) for each in errors] == [error]


@pytest.mark.parametrize("has_eos", [False, True], ids=["without eos", "with eos"])
def test_columns_come_as_soon_as_they_are_complete(llama: Any, eos: int, has_eos: bool) -> None:
    """Not all at the end, nor held back by a row that has ended: the criterion sees how many have been streamed."""
    recorder, seen = Recorder(), []
    watch = StoppingCriteriaList([lambda ids, scores: bool(seen.append(len(recorder.got)))])
    options: dict[str, Any] = {"eos_token_id": eos} if has_eos else {}
    text = ours(llama, BATCH, "plain", leapahead_streamer=recorder, stopping_criteria=watch, **options)
    assert max(seen) == text.shape[1] - LENGTH  # the prompt, and all columns but the last


# ----------------------------------------------------------------------------------------------------------- refusals

REFUSALS: dict[str, dict[str, Any]] = {
    "num_beams": {"num_beams": 2},
    "penalty_alpha": {"penalty_alpha": 0.6, "top_k": 4},
    "dola_layers": {"dola_layers": "low"},
    "guidance_scale": {"guidance_scale": 1.5},
    "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 3},
    "assistant_early_exit": {"assistant_early_exit": 1},
    "use_mtp": {"use_mtp": True},
    "is_assistant": {"is_assistant": True},
    "output_attentions": {"output_attentions": True, "return_dict_in_generate": True},
    "output_hidden_states": {"output_hidden_states": True, "return_dict_in_generate": True},
    "cache_implementation": {"cache_implementation": "offloaded"},
    "cache_config": {"cache_config": {"nbits": 4}},
    "diversity_penalty": {"diversity_penalty": 0.5},
    "num_beam_groups": {"num_beam_groups": 2},
    "constraints": {"constraints": [object()]},
    "force_words_ids": {"force_words_ids": [[5]]},
    "assistant_ensemble_weight": {"assistant_ensemble_weight": 0.5},
    "SynthIDTextWatermarkLogitsProcessor": {
        "watermarking_config": SynthIDTextWatermarkingConfig(keys=[654, 400, 836, 123], ngram_len=5),
        "do_sample": True,
    },
    "token_type_ids": {"token_type_ids": torch.zeros(1, 9, dtype=torch.long)},
    "position_ids": {"position_ids": torch.arange(9)[None] + 1},
    "drafter 'plain' has no option": {"drafter": "plain", "window": 3},
    "there is no drafter 'lokahead' .did you mean 'lookahead'": {"drafter": "lokahead"},
    "did you mean 'window'": {"drafter": "lookahead", "drafter_options": {"windw": 3}},
    "block=0": {"drafter": "jacobi", "block": 0},
    "there is no source 'heads'": {"drafter": "auto", "sources": "heads"},
    "nodes=-1": {"drafter": "suffix", "nodes": -1},
    "drafter_cache='file'": {"drafter_cache": "file"},
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_honoured_is_refused_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (torch, torch.cuda):  # of a cache that is offloaded; PyTorch may refuse it where there is no GPU
        monkeypatch.setattr(place, "Stream", object)
    model = tiny("gpt2")  # of which Transformers passes `token_type_ids` on
    options = {"drafter": "plain", "max_new_tokens": 5, **REFUSALS[name]}
    with pytest.raises((Refused, BadParameter), match=name):
        model.generate(**SINGLE, custom_generate=hf.generate, **options)


def test_labels_have_no_effect(llama: Any) -> None:
    """They are in the batches of a trainer, and Transformers takes them."""
    inputs = {**BATCH, "labels": BATCH["input_ids"]}
    assert ours(llama, inputs).tolist() == theirs(llama, inputs).tolist()


def test_inputs_that_are_refused(llama: Any) -> None:
    right = {"input_ids": BATCH["input_ids"].flip(1), "attention_mask": BATCH["attention_mask"].flip(1)}
    with pytest.raises(Refused, match="padding_side"):
        ours(llama, right)
    with pytest.raises(BadParameter, match="all padding"):
        ours(llama, {"input_ids": torch.full((1, 3), 5), "attention_mask": torch.zeros(1, 3, dtype=torch.long)})
    with pytest.raises(Refused, match="attention_mask of shape"):
        ours(llama, {"input_ids": SINGLE["input_ids"], "attention_mask": torch.tensor([[0] + [1] * 9])})
    with pytest.raises((Refused, BadParameter), match="inputs_embeds"):
        ours(llama, {"inputs_embeds": llama.get_input_embeddings()(SINGLE["input_ids"])})


def test_models_and_arguments_that_are_refused(llama: Any) -> None:
    with pytest.raises(BadParameter, match="Linear is not a Transformers model"):
        run(torch.nn.Linear(2, 2), SINGLE)
    with pytest.raises(BadParameter, match="LlamaModel cannot generate"):
        run(LlamaModel(llama.config), SINGLE)
    refused = {"assistant_tokenizer": object(), "synced_gpus": True, "token_healing": True}
    for name, value in {**refused, "cache_implementation": "paged", "custom_generate": "other/one"}.items():
        with pytest.raises(Refused, match=name):
            run(llama, SINGLE, **{name: value})
    with pytest.raises(ValueError, match="windw"):
        run(llama, SINGLE, windw=3)


def test_every_field_of_the_config_is_honoured_or_refused() -> None:
    """Fails when Transformers brings a new field: put it where it belongs."""
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    groups = [set(hf_fields.HONOURED), set(hf_fields.WITHOUT_EFFECT), set(hf_fields.REFUSED)]
    assert set.union(*groups) == fields
    assert sum(map(len, groups)) == len(fields)


def test_every_processor_of_transformers_is_known() -> None:
    """Fails when Transformers brings a new one: read whether it keeps a state, knows the batch, or reads no prefix."""
    classes = {
        name
        for name, each in vars(logits_process).items()
        if inspect.isclass(each) and issubclass(each, LogitsProcessor) and each is not LogitsProcessor
    }
    functions_of_the_prefix = {
        "MinLengthLogitsProcessor",
        "MinNewTokensLengthLogitsProcessor",
        "RepetitionPenaltyLogitsProcessor",
        "EncoderRepetitionPenaltyLogitsProcessor",
        "NoRepeatNGramLogitsProcessor",
        "EncoderNoRepeatNGramLogitsProcessor",
        "SequenceBiasLogitsProcessor",
        "NoBadWordsLogitsProcessor",
        "PrefixConstrainedLogitsProcessor",
        "ForcedBOSTokenLogitsProcessor",
        "ForcedEOSTokenLogitsProcessor",
        "ExponentialDecayLengthPenalty",
        "SuppressTokensAtBeginLogitsProcessor",
        "WhisperTimeStampLogitsProcessor",
        "AlternatingCodebooksLogitsProcessor",
        "WatermarkLogitsProcessor",
    }
    assert classes == functions_of_the_prefix | hf_fields.PREFIX_FREE | set(hf_fields.REFUSED_PROCESSORS)


def test_every_option_of_a_built_in_drafter_is_a_keyword() -> None:
    keywords = set(inspect.signature(hf.generate).parameters)
    for name in registry.BUILT_IN:
        assert set(registry.options(registry.load(name))) <= keywords, name
    assert not keywords & set(vars(GenerationConfig()))


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_without_torch_one_sentence_says_what_to_install(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; import leapahead; leapahead.hf"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert last.endswith(f'leapahead.hf needs {missing}, which is not installed: pip install "leapahead[transformers]"')


# -------------------------------------------------------------------------------------------------------- draft models


def test_an_assistant_model_drafts(llama: Any) -> None:
    expected = theirs(llama, SINGLE).tolist()
    options: dict[str, Any] = {"assistant_model": copy.deepcopy(llama), "depth": 2, "nodes": 4}
    stats: list[Stats] = []
    assert run(llama, SINGLE, drafter="draft_model", stats=stats, **options).tolist() == expected
    assert stats[0].steps <= 8  # the assistant is right in every step
    with pytest.raises(BadParameter, match="assistant_model cannot be used"):
        run(llama, SINGLE, drafter="suffix", **options)
    with pytest.raises(BadParameter, match="its own draft model"):  # it would keep itself alive
        run(llama, SINGLE, drafter="draft_model", assistant_model=llama)
    learning: dict[str, Any] = {"learn": 1, "learned": "folder"}
    with pytest.raises(Refused, match=r"learned=.folder. is not supported by leapahead\.hf: .* use leapahead\.LLM"):
        run(llama, SINGLE, drafter="draft_model", **learning, **options)


FIRST_LAYERS: dict[str, Any] = {"draft": "self:first=1", "depth": 2, "nodes": 5}


def test_the_model_s_own_first_layers_draft(llama: Any) -> None:
    """Beside the rows of a batch with left padding."""
    stats: list[Stats] = []
    found = ours(llama, BATCH, "draft_model", stats=stats, **FIRST_LAYERS)
    assert found.tolist() == theirs(llama, BATCH).tolist()
    assert all(each.drafter["draft"]["forwards"] > 0 for each in stats)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # PEFT uses it
def test_peft_adapters() -> None:
    """Adapters of the layers work, and may be changed between calls; what cannot be honoured is refused by name."""
    peft = pytest.importorskip("peft")
    lora = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(tiny("llama"), peft.LoraConfig(**lora)).eval()
    prompt_tuned = peft.get_peft_model(tiny("llama"), prompts).eval()
    texts = []

    def check() -> None:
        texts.append(theirs(model, BATCH).tolist())
        assert ours(model, BATCH, "draft_model", **FIRST_LAYERS).tolist() == texts[-1]
        assert run(model, BATCH, drafter="lookahead").tolist() == texts[-1]

    check()
    with model.disable_adapter():
        check()
    model.add_adapter("other", peft.LoraConfig(**lora))
    model.set_adapter("other")
    check()
    assert len({str(text) for text in texts}) == 3
    model.merge_adapter()
    check()
    model.unmerge_adapter()
    for call in (ours, run):
        with pytest.raises(Refused, match="adapter_names"):
            call(model, BATCH, adapter_names=["default", "other", "other"])
        with pytest.raises(Refused, match="virtual tokens"):
            call(prompt_tuned, BATCH)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # PEFT uses it
@pytest.mark.filterwarnings("ignore:Unsupported layer type .*RMSNorm")
@pytest.mark.parametrize("kind", ["IA3Config", "LNTuningConfig", "VeraConfig", "OFTConfig"])
def test_peft_adapters_of_other_kinds(kind: str) -> None:
    peft = pytest.importorskip("peft")
    options: dict[str, Any] = {
        "IA3Config": {"target_modules": ["v_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
        "LNTuningConfig": {"target_modules": ["input_layernorm"]},
        "VeraConfig": {"target_modules": ["q_proj"]},
        "OFTConfig": {"target_modules": ["q_proj"], "oft_block_size": 4, "r": 0},
    }[kind]
    model = peft.get_peft_model(tiny("llama"), getattr(peft, kind)(task_type="CAUSAL_LM", **options)).eval()
    assert ours(model, BATCH, "lookahead").tolist() == theirs(model, BATCH).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "qwen2_vl"])
def test_text_of_a_model_that_takes_images(name: str) -> None:
    """Transformers gives it the encoders' outputs, none for text; Qwen2-VL gets four positions of each token."""
    text = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    text |= {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCAB, "initializer_range": 0.25}
    text |= {"max_position_embeddings": 128, "pad_token_id": PAD, "bos_token_id": None, "eos_token_id": None}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    if name == "gemma3":
        ids = {"image_token_index": 90, "boi_token_index": 91, "eoi_token_index": 92, "mm_tokens_per_image": 1}
        vision |= {"image_size": 8, "patch_size": 4}
        config: Any = Gemma3Config(text_config=text, vision_config=vision, **ids)
        kind: Any = Gemma3ForConditionalGeneration
    else:
        vision = {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 1}
        config = Qwen2VLConfig(text_config={**text, "rope_parameters": rope}, vision_config=vision)
        config.image_token_id, config.video_token_id, config.vision_start_token_id = 90, 91, 92
        kind = Qwen2VLForConditionalGeneration
    torch.manual_seed(0)
    model = kind(config).eval()
    for inputs in (SINGLE, BATCH):
        assert ours(model, inputs, "lookahead").tolist() == theirs(model, inputs).tolist()
    processors: Any = LogitsProcessorList()
    with pytest.raises(
        Refused, match=r"the model input 'inputs_embeds' is not supported by leapahead\.hf, which takes"
    ):
        hf_fields.refuse(model, model.generation_config, processors, {"inputs_embeds": torch.ones(1)})


def test_quantised_models() -> None:
    quanto = pytest.importorskip("optimum.quanto")
    model = tiny("llama")
    quanto.quantize(model, weights=quanto.qint8)
    quanto.freeze(model)
    assert ours(model, BATCH, "lookahead").tolist() == theirs(model, BATCH).tolist()


# ------------------------------------------------------------------------------------- what is kept between two calls


@pytest.mark.slow
def test_the_drafter_cache_is_kept_between_calls() -> None:
    """By default with the model; with False nothing is kept; a user's own cache may be shared and saved."""
    model, own = tiny("llama"), DrafterCache()

    def accepted(**options: Any) -> int:
        stats: list[Stats] = []
        text = ours(model, BATCH, "suffix", nodes=8, max_new_tokens=40, stats=stats, **options)
        assert text.tolist() == theirs(model, BATCH, max_new_tokens=40).tolist()
        return sum(each.accepted for each in stats)

    first = accepted()
    assert accepted(drafter_cache=False) == first == accepted(drafter_cache=own)
    assert accepted() > 2 * first
    assert accepted(drafter_cache=own) > 2 * first
    assert accepted(drafter_cache=False) == first
    other = tiny("llama", VOCAB + 1)
    with pytest.raises(BadParameter, match="vocabulary of 96 and the model has a vocabulary of 97"):
        ours(other, SINGLE, drafter_cache=own)


def test_the_drafter_cache_is_kept_where_hooks_change() -> None:
    """As of activation steering, which registers them anew for each call."""
    model, counts = tiny("llama"), []
    for _ in range(2):
        hook, stats = model.model.layers[0].register_forward_hook(lambda module, args, output: None), list[Stats]()
        ours(model, BATCH, "suffix", nodes=8, max_new_tokens=24, stats=stats)
        counts.append(sum(each.accepted for each in stats))
        hook.remove()
    assert counts[1] > 1.5 * counts[0]
    model.resize_token_embeddings(VOCAB + 1)  # of which it cannot be kept
    assert ours(model, SINGLE, "suffix").tolist() == theirs(model, SINGLE).tolist()


def test_the_engine_of_a_model_with_offloaded_layers_is_kept() -> None:
    """Its parameters are other objects after each forward."""
    model = tiny("llama")
    pytest.importorskip("accelerate").cpu_offload(model.model.layers[1], torch.device("cpu"))
    expected, engines = theirs(model, BATCH).tolist(), []
    for _ in range(2):
        assert ours(model, BATCH, "draft_model", draft="self:first=1").tolist() == expected
        engines.append(hf_engine._kept[model])
    assert engines[0] is engines[1]


def test_a_drafter_cache_can_be_saved(llama: Any, tmp_path: Path) -> None:
    own = DrafterCache()
    ours(llama, BATCH, "suffix", drafter_cache=own)
    loaded = DrafterCache.load(own.save(tmp_path / "cache"))
    stats: list[Stats] = []
    ours(llama, BATCH, "suffix", drafter_cache=loaded, stats=stats)
    assert sum(each.accepted for each in stats) > 30


def test_a_saved_drafter_cache_is_shared_with_an_llm(llama: Any, tokenizer: Any, tmp_path: Path) -> None:
    """Here the tokenizer is not known. The first `LLM` that uses the cache names it, for a saved one too."""
    own, file = DrafterCache(), tmp_path / "cache"
    ours(llama, BATCH, "suffix", drafter_cache=own)
    own.save(file)
    llm = LLM(llama, tokenizer=tokenizer, drafter="suffix", drafter_cache=file)
    prompt = SINGLE["input_ids"][0].tolist()
    assert llm.generate(prompt, max_new_tokens=5).tokens == theirs(llama, SINGLE, max_new_tokens=5)[0, 9:].tolist()
    other = copy.deepcopy(tokenizer)
    other.add_tokens(["another token"])
    for drafter_cache in (llm.save_drafter_cache(), llm.drafter_cache):
        with pytest.raises(BadParameter, match=f"belongs to the tokenizer '{fingerprint(tokenizer)}' and the model"):
            LLM(llama, tokenizer=other, drafter_cache=drafter_cache)
    ours(llama, BATCH, "suffix", drafter_cache=llm.drafter_cache)
    own.merge(file)
    assert own.tokenizer == fingerprint(tokenizer)
    unknown = DrafterCache()
    ours(llama, BATCH, "suffix", drafter_cache=unknown)
    own.merge(unknown.save(tmp_path / "unknown"))
    own.merge_bytes(unknown.to_bytes())  # in the other order as well
    assert own.tokenizer == fingerprint(tokenizer)


@pytest.mark.slow
def test_everything_is_released_with_the_model() -> None:
    model = tiny("llama")
    for options in [{}, FIRST_LAYERS, {**FIRST_LAYERS, "draft": "self:skip=1"}]:
        ours(model, BATCH, "draft_model" if options else "lookahead", **options)
    gone = [weakref.ref(model), weakref.ref(model.model.layers[1].self_attn.q_proj.weight)]
    del model
    gc.collect()
    assert [each() for each in gone] == [None, None]


@pytest.mark.slow
def test_the_kv_cache_is_released_after_every_call(llama: Any) -> None:
    def tensors() -> int:
        gc.collect()
        return sum(each.numel() for each in gc.get_objects() if type(each) is torch.Tensor)

    ours(llama, BATCH, "lookahead")
    before = tensors()
    during: list[int] = []
    watch = StoppingCriteriaList([lambda ids, scores: bool(during.append(tensors())) if len(during) < 1 else False])
    ours(llama, BATCH, "lookahead", stopping_criteria=watch)
    assert tensors() <= before + 100 < during[0]


@pytest.mark.slow
def test_weights_modules_dtype_and_attention_may_change() -> None:
    model = tiny("llama")

    def check() -> None:
        expected = theirs(model, BATCH).tolist()
        assert ours(model, BATCH, "lookahead").tolist() == expected
        assert ours(model, BATCH, "draft_model", **FIRST_LAYERS).tolist() == expected

    check()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))
    check()
    model.model.layers[1] = tiny("llama", seed=5).model.layers[1]
    check()
    model.set_attn_implementation("eager")
    check()
    model.set_attn_implementation("sdpa")
    model.double()
    check()


def test_forward_hooks_may_change() -> None:
    """As of activation steering; drafts of the first layers are made anew."""
    model = tiny("llama")
    texts = []

    def check() -> None:
        texts.append(theirs(model, SINGLE, max_new_tokens=8).tolist())
        assert ours(model, SINGLE, "draft_model", max_new_tokens=8, **FIRST_LAYERS).tolist() == texts[-1]

    check()
    hook = model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: output.roll(1, -1))
    check()
    hook.remove()
    check()
    assert texts[0] == texts[2] != texts[1]
    hook = model.model.layers[1].register_forward_hook(lambda module, args, output: output.roll(1, -1))
    assert ours(model, SINGLE, "lookahead").tolist() == theirs(model, SINGLE).tolist()
    with pytest.raises(Refused, match=r"a layer of .* does more than add attention and MLP"):
        ours(model, SINGLE, "draft_model", **FIRST_LAYERS)


# ------------------------------------------------------------------------------------------------ errors and threads


def interrupted(ids: torch.Tensor, scores: Any) -> bool:
    if ids.shape[1] > LENGTH + 2:
        raise KeyboardInterrupt
    return False


def failing_processor(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    if ids.shape[1] > LENGTH + 2:
        raise ZeroDivisionError("the processor failed")
    return scores


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"stopping_criteria": StoppingCriteriaList([failing])}, ZeroDivisionError),
        ({"stopping_criteria": StoppingCriteriaList([interrupted])}, KeyboardInterrupt),
        ({"logits_processor": LogitsProcessorList([failing_processor])}, ZeroDivisionError),
        ({"leapahead_streamer": Recorder(fails_at=0)}, OSError),
        ({"leapahead_streamer": Recorder(fails_at=5)}, OSError),
    ],
    ids=["criterion", "interrupt", "processor", "streamer", "streamer later"],
)
def test_errors_reach_the_caller_and_leave_the_model_usable(options: dict[str, Any], error: type[Exception]) -> None:
    model = tiny("llama").train()  # it has no dropout
    model.model.layers[1].eval()
    modes = [part.training for part in model.modules()]
    with pytest.raises(error):
        ours(model, BATCH, "lookahead", **options)
    assert [part.training for part in model.modules()] == modes
    assert ours(model, BATCH, "lookahead").tolist() == theirs(model, BATCH).tolist()
    assert [part.training for part in model.modules()] == modes


def test_dropout_is_refused() -> None:
    with pytest.raises(Refused, match=r"model\.eval\(\)"):
        ours(tiny("gpt2").train(), SINGLE)


def test_a_criterion_may_generate_itself(llama: Any) -> None:
    expected, inner = theirs(llama, BATCH, max_new_tokens=6).tolist(), theirs(llama, SINGLE, max_new_tokens=6).tolist()
    results: list[Any] = []
    call = lambda *_: bool(results.append(ours(llama, SINGLE, "jacobi", max_new_tokens=6).tolist()))  # noqa: E731
    options = {"stopping_criteria": StoppingCriteriaList([call]), "max_new_tokens": 6}
    assert ours(llama, BATCH, "jacobi", **options).tolist() == expected
    assert results == [inner] * 6


def test_threads_share_one_model() -> None:
    """Each gets exactly its own text, also beside a call that fails, and training mode is restored by the last one."""
    model = tiny("llama").train()
    jobs = [
        (padded(*lengths, seed=seed), {"drafter": drafter, "max_new_tokens": new})
        for seed, (lengths, drafter, new) in enumerate(
            [((5, 9), "lookahead", 30), ((11,), "suffix", 25), ((3, 8, 6), "recycling", 12), ((4,), "plain", 40)]
        )
    ]
    expected = [theirs(model, inputs, max_new_tokens=options["max_new_tokens"]).tolist() for inputs, options in jobs]
    start = threading.Barrier(len(jobs) + 1)
    found: dict[tuple[int, int], Any] = {}

    def work(index: int) -> None:
        start.wait()
        inputs, options = jobs[index]
        for time in range(3):
            found[index, time] = model.generate(**inputs, custom_generate=hf.generate, **options).tolist()

    def fail() -> None:
        start.wait()
        with pytest.raises(ZeroDivisionError):
            ours(model, BATCH, "jacobi", stopping_criteria=StoppingCriteriaList([failing]))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(jobs))]
    threads.append(threading.Thread(target=fail))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {(index, time): expected[index] for index in range(len(jobs)) for time in range(3)}
    assert all(part.training for part in model.modules())


def test_a_first_call_on_one_model_holds_up_no_other_model(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which tests the model and may take minutes."""
    other, begun, go_on = tiny("llama", seed=1), threading.Event(), threading.Event()
    expected, make = ours(llama, SINGLE).tolist(), hf_engine.ModelEngine.__init__

    def wait(self: Any, model: Any, state: object) -> None:
        begun.set()
        assert go_on.wait(30)
        make(self, model, state)

    monkeypatch.setattr(hf_engine.ModelEngine, "__init__", wait)
    with ThreadPoolExecutor(2) as pool:
        late = pool.submit(ours, other, SINGLE)
        try:
            assert begun.wait(30)
            assert pool.submit(ours, llama, SINGLE).result(10).tolist() == expected
        finally:
            go_on.set()
        assert late.result(30).tolist() == theirs(other, SINGLE).tolist()


class Interrupted(Mutex):
    """A lock the second wait for which is interrupted."""

    waits = 0

    def __enter__(self) -> Any:
        self.waits += 1
        if self.waits == 2:
            raise KeyboardInterrupt
        return super().__enter__()


def test_an_interrupt_at_the_end_of_a_call_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its mode is restored, and no entries of the cache are kept, which would be wrong once the weights change."""
    monkeypatch.setattr(hf_engine, "Mutex", Interrupted)
    model = tiny("llama").train()
    with pytest.raises(KeyboardInterrupt):
        ours(model, BATCH)
    assert all(part.training for part in model.modules())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))
    assert ours(model, BATCH).tolist() == theirs(model, BATCH).tolist()
    assert all(part.training for part in model.modules())


# ---------------------------------------------------------------------------------------------------- the string form


@pytest.fixture
def modules_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers copies the code it runs; here, not into the user's home."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))


@pytest.mark.usefixtures("modules_cache")
def test_string_form(llama: Any, eos: int, tokenizer: Any) -> None:
    """Unlike a callable, it is given the streamer, the tokenizer and the assistant model."""
    string: dict[str, Any] = {"custom_generate": str(HUB_FOLDER), "trust_remote_code": True, "max_new_tokens": 20}
    expected = theirs(llama, BATCH, eos_token_id=eos).tolist()
    stats: list[Stats] = []
    mine = llama.generate(**BATCH, **string, drafter="lookahead", window=4, stats=stats, eos_token_id=eos)
    assert mine.tolist() == expected
    assert len(stats) == 3
    assert llama.generate(BATCH["input_ids"], **string).tolist() == theirs(llama, BATCH).tolist()
    streamer, reference = Recorder(), Recorder()
    llama.generate(**SINGLE, **string, drafter="prompt_lookup", streamer=streamer)
    theirs(llama, SINGLE, streamer=reference)
    assert streamer.got == reference.got
    base: dict[str, Any] = {"suppress_tokens": only_text(tokenizer)["suppress_tokens"], "tokenizer": tokenizer}
    text = tokenizer.decode(theirs(llama, SINGLE, **base)[0, -6:])
    base["stop_strings"] = text[:2]
    assert llama.generate(**SINGLE, **string, **base).tolist() == theirs(llama, SINGLE, **base).tolist()
    with pytest.raises(Refused, match="num_beams"):
        llama.generate(**SINGLE, **string, num_beams=3)


@pytest.mark.usefixtures("modules_cache")
def test_a_model_folder_may_bring_it(llama: Any, tmp_path: Path) -> None:
    llama.save_pretrained(tmp_path / "model")
    shutil.copytree(HUB_FOLDER / "custom_generate", tmp_path / "model" / "custom_generate")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", trust_remote_code=True)
    stats: list[Stats] = []
    text = model.generate(SINGLE["input_ids"], drafter="jacobi", block=3, stats=stats, max_new_tokens=12)
    assert text.tolist() == theirs(llama, SINGLE, max_new_tokens=12).tolist()
    assert stats[0].drafted > 0
    assert model.generate(SINGLE["input_ids"], GenerationConfig(max_new_tokens=12)).tolist() == text.tolist()
    again = model.generate(SINGLE["input_ids"], custom_generate=hf.generate, max_new_tokens=12)
    assert again.tolist() == text.tolist()
    with pytest.raises(Refused, match="custom_generate"):
        model.generate(SINGLE["input_ids"], custom_generate="another/one", max_new_tokens=12)
    assert model.generate(**BATCH, max_new_tokens=20).tolist() == theirs(llama, BATCH).tolist()


def test_options_of_any_drafter_may_be_given_to_run(llama: Any) -> None:
    stats: list[Stats] = []
    for options in [{"block": 2}, {"drafter_options": {"block": 2, "seed": 4}}]:
        run(llama, SINGLE, drafter="jacobi", stats=stats, **options)
    assert all(max(each.accepted_at, default=0) <= 2 for each in stats)
    assert all(each.nodes_per_step <= 3 for each in stats)


FORKED = """
import os, signal, threading
os.environ["OMP_NUM_THREADS"] = "1"
import torch, transformers
from leapahead import hf

sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=50)
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()
inside, over = threading.Event(), threading.Event()

def wait(ids, scores, **_):
    inside.set()
    return torch.tensor([over.wait() and False])

def text(**options):
    return hf.run(model, torch.tensor([[5, 6, 7]]), max_new_tokens=4, drafter="plain", **options).tolist()

thread = threading.Thread(target=lambda: text(stopping_criteria=[wait]))
thread.start(), inside.wait()
if not (child := os.fork()):
    signal.alarm(60)
    print(text(), flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0, "the child was hung"
over.set(), thread.join()
print(text())
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_child_decodes_while_a_thread_of_its_parent_does() -> None:
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    child, parent = done.stdout.splitlines()
    assert child == parent
