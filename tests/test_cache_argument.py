"""By which name a model is given its cache: by that of its own forward, so that Transformers has nothing to warn of."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import seq2seq
import torch
import transformers
from architectures import BY_NAME, SIZES, sharpen
from helpers import PROMPT, Oracle, Scattered, run
from transformers.cache_utils import DynamicCache

from leapahead.core.errors import Refused
from leapahead.integrations import hf
from leapahead.models.base import CHAIN, TREE
from leapahead.models.transformers.arguments import cache_name, returned_cache, takes_cache
from leapahead.models.transformers.encoder_decoder import EncoderDecoderTarget
from leapahead.models.transformers.model import TransformersTarget

IDS = torch.tensor([[5, 6, 7, 5, 6]])
# One of each kind of executor: trees, chains, replay with attention and without, plain, and states of their own form.
KINDS = ("llama", "bloom", "qwen3_next", "mamba2", "mamba", "rwkv", "xlstm", "minimax")
INHERITED = cache_name(BY_NAME["llama"].build())  # the name in the Transformers that is installed


class OldNames(transformers.LlamaForCausalLM):
    """Code as it came with checkpoints: it keeps the older name under any version."""

    def forward(
        self, input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None, past_key_values: Any = None,
        use_cache: Any = None, logits_to_keep: Any = 0,
    ) -> Any:  # fmt: skip
        given = {INHERITED: past_key_values, "use_cache": use_cache, "logits_to_keep": logits_to_keep}
        return super().forward(input_ids, attention_mask, position_ids, **given)


class NewNames(transformers.LlamaForCausalLM):
    """The same with the newer name."""

    def forward(
        self, input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None, cache: Any = None,
        use_cache: Any = None, logits_to_keep: Any = 0,
    ) -> Any:  # fmt: skip
        given = {INHERITED: cache, "use_cache": use_cache, "logits_to_keep": logits_to_keep}
        return super().forward(input_ids, attention_mask, position_ids, **given)


class OldState(transformers.MambaForCausalLM):
    """The same of a model that keeps a state."""

    def forward(
        self, input_ids: Any = None, attention_mask: Any = None, cache_params: Any = None, use_cache: Any = None
    ) -> Any:
        name = cache_name(super())
        return super().forward(input_ids, attention_mask, **{name: cache_params}, use_cache=use_cache)


@pytest.fixture
def deprecations() -> Iterator[list[str]]:
    """What Transformers logs of deprecated names, which it does once a process; Python's warnings are errors anyway."""
    found: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "deprecated" in record.getMessage():
                found.append(record.getMessage())

    logger, kept = logging.getLogger("transformers"), Kept()
    transformers.utils.logging.warning_once.cache_clear()
    logger.addHandler(kept)
    yield found
    logger.removeHandler(kept)


def decoded(target: TransformersTarget) -> None:
    """The same text with the drafts that the target can be given, and without."""
    plain = run(target).tokens
    kinds = {CHAIN: Oracle, TREE: Scattered}
    for kind in kinds.keys() & target.info.capabilities:
        assert run(target, kinds[kind]([*PROMPT, *plain])).tokens == plain


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_transformers_has_nothing_to_warn_of(name: str, deprecations: list[str]) -> None:
    decoded(TransformersTarget(BY_NAME[name].build()))
    assert deprecations == []


@pytest.mark.slow
def test_nor_in_exact_mode_nor_of_an_encoder_decoder_model_nor_inside_generate(deprecations: list[str]) -> None:
    decoded(TransformersTarget(BY_NAME["llama"].build(), exclusive=True, exact=True))
    decoded(EncoderDecoderTarget(seq2seq.build("t5")))
    model = BY_NAME["llama"].build()
    options = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}
    mine = model.generate(IDS, custom_generate=hf.generate, drafter="prompt_lookup", **options)
    assert mine.sequences.tolist() == model.generate(IDS, **options).sequences.tolist()
    assert deprecations == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", [OldNames, NewNames])
def test_code_of_a_checkpoint_with_either_name(kind: type[Any], deprecations: list[str]) -> None:
    torch.manual_seed(0)
    model = sharpen(kind(transformers.LlamaConfig(**SIZES)).eval())
    assert cache_name(model) == ("past_key_values" if kind is OldNames else "cache")
    target = TransformersTarget(model)
    assert TREE in target.info.capabilities
    decoded(target)
    decoded(TransformersTarget(model, exclusive=True, exact=True))
    assert deprecations == []


@pytest.mark.slow
def test_code_of_a_checkpoint_with_a_state(deprecations: list[str]) -> None:
    torch.manual_seed(0)
    model = sharpen(OldState(transformers.MambaConfig(**SIZES, state_size=8)).eval())
    assert cache_name(model) == "cache_params"
    decoded(TransformersTarget(model))
    assert deprecations == []


def test_names() -> None:
    class Model:
        def forward(self, cache: Any = None, past_key_values: Any = None) -> None: ...

    class Without:
        def forward(self, input_ids: Any, **options: Any) -> None: ...

    assert cache_name(Model()) == "past_key_values"  # `cache` is something else there
    assert takes_cache(Model())
    assert not takes_cache(Without())
    with pytest.raises(Refused, match="the forward of Without takes no cache"):
        cache_name(Without())
    assert returned_cache({"past_key_values": 1}, "past_key_values") == 1
    assert returned_cache({"cache": 1}, "past_key_values") == 1


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
@pytest.mark.parametrize("name", ["past_key_values", "cache"])
def test_a_cache_of_the_user_is_refused_by_either_name_that_transformers_takes(name: str) -> None:
    model = BY_NAME["llama"].build()
    try:
        model.generate(IDS, **{name: DynamicCache()}, max_new_tokens=2)
    except ValueError:  # a version that has no such argument
        expected: Any = ValueError, name
    else:
        expected = Refused, r"is not supported by leapahead\.hf, which uses its own KV cache"
    with pytest.raises(expected[0], match=expected[1]):
        model.generate(IDS, custom_generate=hf.generate, **{name: DynamicCache()}, max_new_tokens=2)
    with pytest.raises(expected[0], match=f"{name}.*{expected[1]}" if expected[0] is Refused else name):
        hf.run(model, IDS, **{name: DynamicCache()}, max_new_tokens=2)
