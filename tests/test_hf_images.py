"""Prompts with images and sounds in `leapahead.hf`: the text is that of Transformers' own `generate`."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import transformers
from architectures import BY_NAME, SIZES, sharpen
from image_families import (
    BEGIN,
    END,
    FAMILIES,
    IMAGE,
    PAD,
    PALIGEMMA,
    QWEN,
    QWEN_IDS,
    TEXT,
    VIDEO,
    VISION,
    Family,
    Picture,
)
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from leapahead import Engine
from leapahead.core.errors import Refused
from leapahead.core.sampling import SamplingParams
from leapahead.engine.loop import Running
from leapahead.integrations import hf, hf_engine, hf_images
from leapahead.models.base import Capture
from leapahead.models.encoder_decoder import opened
from leapahead.models.prompt_entries import PromptEntries
from leapahead.models.toy import ToyTarget

NEW = 44
HEAD, TAIL = [5, 6, 7, 8, 9, BEGIN], [END, 5, 6, 7, 8, 9, 10, 11]
DRAFTERS = ["prompt_lookup", "suffix", "recycling", "lookahead", "auto"]
FAST = ["qwen2_vl", "llava"]
FIRST: dict[str, Any] = {"draft": "self:first=1", "depth": 2, "nodes": 5}
MULTIAXIAL = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v"]  # whose images take fewer positions than tokens
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES if name not in FAST]
PER_FAMILY = [*FAST, *OTHERS]

_built: dict[str, Any] = {}


def built(name: str) -> tuple[Family, Any]:
    """A family with its model, which is made once."""
    family = FAMILIES[name]
    if not family.installed:
        pytest.skip(f"this Transformers has no {family.config}")
    if name not in _built:
        _built[name] = family.build(1)
    return family, _built[name]


def one(family: Family, seed: int = 1) -> dict[str, Tensor]:
    return family.inputs([*HEAD, Picture(seed), *TAIL])


def several(family: Family) -> dict[str, Tensor]:
    """Left padding, a row without an image, one with two, and two rows that differ in nothing but the image."""
    return family.inputs(
        [*HEAD, Picture(1, wide=True), *TAIL],
        [*HEAD, Picture(2, wide=True), *TAIL],
        [5, 6, 7],
        [4, BEGIN, Picture(3), END, 5, BEGIN, Picture(4, wide=True), END, 6, 7],
    )


def greedy(model: Any, inputs: dict[str, Tensor], **options: Any) -> Any:
    return model.generate(**inputs, **{"max_new_tokens": NEW, "do_sample": False, "pad_token_id": PAD, **options})


def ours(model: Any, inputs: dict[str, Tensor], drafter: str = "prompt_lookup", **options: Any) -> Any:
    return greedy(model, inputs, custom_generate=hf.generate, drafter=drafter, **options)


def new(inputs: dict[str, Tensor], found: Tensor) -> list[list[int]]:
    return found[:, inputs["input_ids"].shape[1] :].tolist()  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------------------------- greedy texts


@pytest.mark.parametrize("name", PER_FAMILY)
def test_the_text_of_one_image(name: str) -> None:
    """It is that of `generate`, which another image changes, in fewer forwards than tokens."""
    family, model = built(name)
    stats: list[Any] = []
    inputs = one(family)
    theirs = greedy(model, inputs)
    assert ours(model, inputs, "lookahead", stats=stats).tolist() == theirs.tolist()
    text = new(inputs, theirs)[0]
    assert len(set(text)) > 5
    assert text[:12] != new(inputs, greedy(model, one(family, seed=2), max_new_tokens=12))[0]
    assert stats[0].steps < NEW
    assert (stats[0].prefill_forwards, stats[0].reused_tokens) == (1, 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(FAMILIES))
def test_the_texts_of_several_rows(name: str) -> None:
    family, model = built(name)
    inputs = several(family)
    theirs = greedy(model, inputs).tolist()
    for drafter in DRAFTERS:
        assert ours(model, inputs, drafter).tolist() == theirs, drafter
    assert hf.run(model, **inputs, max_new_tokens=NEW, do_sample=False, pad_token_id=PAD).tolist() == theirs


@pytest.mark.slow
@pytest.mark.parametrize("name", list(FAMILIES))
def test_texts_with_placeholders(name: str) -> None:
    """Ids of images that the model writes, and that are drafted, are tokens like others."""
    family, model = built(name)
    inputs = several(family)
    for strength in (2.0, 3.0, 4.0, 6.0):  # until some texts have both
        bias = {(IMAGE,): strength, (BEGIN,): strength, (VIDEO,): strength / 2}
        theirs = greedy(model, inputs, sequence_bias=bias)
        texts = new(inputs, theirs)
        if is_mixed := any(2 < text.count(IMAGE) < NEW for text in texts):
            break
    assert is_mixed
    for drafter in ("plain", *DRAFTERS):
        assert ours(model, inputs, drafter, sequence_bias=bias).tolist() == theirs.tolist(), drafter
    drafted = ours(model, inputs, "prediction", prediction=[*[IMAGE] * 8, *texts[0]], sequence_bias=bias)
    assert drafted.tolist() == theirs.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl"])
def test_videos(name: str) -> None:
    """Three frames, of which each takes a position of its own."""
    _, model = built(name)
    grids, tokens = torch.tensor([[3, 4, 4]]), 12
    ids = torch.tensor([[*HEAD, *[VIDEO] * tokens, *TAIL]])
    if name == "qwen3_vl":  # whose frames stand apart, each behind the time of its own
        frames = [token for time in (20, 21, 22) for token in (time, BEGIN, *[VIDEO] * 4, END)]
        ids = torch.tensor([[*HEAD[:-1], *frames, *TAIL[1:]]])
    patches = torch.randn(48, 96, generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": 2 * (ids == VIDEO).long()}
    inputs |= {"pixel_values_videos": patches, "video_grid_thw": grids}
    theirs = greedy(model, inputs).tolist()
    assert greedy(model, {**inputs, "pixel_values_videos": patches.flip(0)}).tolist() != theirs
    for drafter in DRAFTERS:
        assert ours(model, inputs, drafter).tolist() == theirs


@pytest.mark.slow
def test_text_of_a_processor() -> None:
    """Processors give token types for text alone, too."""
    family, model = built("gemma3")
    inputs = family.inputs([*HEAD, *TAIL], [5, 6, 7])
    assert "token_type_ids" in inputs
    assert ours(model, inputs).tolist() == greedy(model, inputs).tolist()


def test_text_of_a_processor_for_a_hybrid_model() -> None:
    """The token types of its processor are no images."""
    model, stats = _hybrid(), list[Any]()
    inputs = FAMILIES["qwen2_vl"].inputs([*HEAD, *TAIL], [5, 6, 7])
    inputs["mm_token_type_ids"] = torch.zeros_like(inputs["input_ids"])
    assert ours(model, inputs, stats=stats).tolist() == greedy(model, inputs).tolist()
    assert sum(each.drafted for each in stats) > 0


@pytest.mark.slow
def test_a_prompt_of_one_token() -> None:
    family, model = built("gemma3")
    inputs = family.inputs([7])
    assert ours(model, inputs).tolist() == greedy(model, inputs).tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "attention"), [(torch.bfloat16, "sdpa"), (torch.float64, "sdpa"), (torch.float32, "eager")]
)
def test_other_precisions(dtype: torch.dtype, attention: str) -> None:
    family = FAMILIES["qwen2_vl"]
    model = family.build(1).to(dtype)
    model.set_attn_implementation(attention)
    inputs = several(family)
    plain = ours(model, inputs, "plain", max_new_tokens=12)
    if dtype != torch.bfloat16:
        assert plain.tolist() == greedy(model, inputs, max_new_tokens=12).tolist()
        assert ours(model, inputs, "lookahead", max_new_tokens=12).tolist() == plain.tolist()
    assert plain.shape == (4, inputs["input_ids"].shape[1] + 12)


@pytest.mark.slow
def test_quantised_weights() -> None:
    quanto = pytest.importorskip("optimum.quanto")
    family = FAMILIES["llava"]
    model = family.build(1)
    quanto.quantize(model, weights=quanto.qint8)
    quanto.freeze(model)
    inputs = several(family)
    assert ours(model, inputs).tolist() == greedy(model, inputs).tolist()


# ------------------------------------------------------------------------------------------------------ other settings


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_vl", "llava_next"])
def test_several_texts_of_a_prompt(name: str) -> None:
    """Sampled texts are those of plain decoding with the same seeds; the first scores are those of Transformers."""
    family, model = built(name)
    inputs = several(family)
    options = {"do_sample": True, "temperature": 0.8, "num_return_sequences": 2, "seed": 3}
    options |= {"output_scores": True, "return_dict_in_generate": True, "max_new_tokens": 20}
    plain = ours(model, inputs, "plain", **options)
    assert plain.sequences.shape[0] == 8
    assert len({tuple(row) for row in plain.sequences.tolist()}) == 8
    for drafter in DRAFTERS:
        assert ours(model, inputs, drafter, **options).sequences.tolist() == plain.sequences.tolist(), drafter
    options.pop("seed")
    theirs = greedy(model, inputs, **options)
    torch.testing.assert_close(plain.scores[0], theirs.scores[0], rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_vl", "gemma3", "idefics3"])
def test_scores_of_rows_that_end_early(name: str) -> None:
    """They go on behind the end of a row, from the same entries."""
    family, model = built(name)
    inputs = several(family)
    texts = new(inputs, greedy(model, inputs))
    end = next(token for token in texts[0] if any(token not in text[:20] for text in texts[1:]))
    options: dict[str, Any] = {"eos_token_id": end, "max_new_tokens": 20}
    options |= {"output_scores": True, "output_logits": True, "return_dict_in_generate": True}
    found, theirs = ours(model, inputs, **options), greedy(model, inputs, **options)
    assert found.sequences.tolist() == theirs.sequences.tolist()
    for name_of_field in ("scores", "logits"):
        given = torch.stack(found[name_of_field]), torch.stack(theirs[name_of_field])
        torch.testing.assert_close(*given, rtol=1e-3, atol=1e-3)


class Heard(BaseStreamer):  # type: ignore[misc]
    """What a streamer received."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True


@pytest.mark.slow
def test_streamers_and_threads() -> None:
    family, model = built("qwen2_vl")
    heard, inputs = Heard(), one(family)
    expected = [greedy(model, one(family, seed)).tolist() for seed in range(3)]
    hf.run(model, **one(family, 0), streamer=heard, max_new_tokens=NEW, do_sample=False)
    assert heard.tokens == expected[0][0]
    assert heard.ended
    found: dict[int, Any] = {}
    threads = [
        threading.Thread(target=lambda at=at: found.update({at: ours(model, one(family, at)).tolist()}))
        for at in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[at] for at in range(3)] == expected
    assert ours(model, inputs).tolist() == expected[1]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"use_cache": False}, {"cache_implementation": "static"}, {"min_new_tokens": 30}])
def test_settings_without_effect_on_the_text(options: dict[str, Any]) -> None:
    family, model = built("gemma3")
    inputs = several(family)
    assert ours(model, inputs, **options).tolist() == greedy(model, inputs, **options).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("options", [FIRST, {**FIRST, "draft": "self:skip=1"}, {"budget": 16, "chunk": 4}])
@pytest.mark.parametrize("name", ["qwen2_vl", "llava"])
def test_drafts_of_the_model_itself(name: str, options: dict[str, Any]) -> None:
    """They share the entries of the prompt where they are of the same layers; else they know its tokens only."""
    family, model = built(name)
    inputs, stats = several(family), list[Any]()
    found = ours(model, inputs, "draft_model" if "draft" in options else "triforce", stats=stats, **options)
    assert found.tolist() == greedy(model, inputs).tolist()
    assert sum(each.drafted for each in stats) > 0


@pytest.mark.parametrize("name", FAST)
def test_entries_that_an_interrupt_costs_are_written_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the middle of an exchange of rows; their tokens do not know the image."""
    family, model = built(name)
    inputs, lost, prefill = one(family), list[int](), Engine._prefill

    def losing(engine: Engine) -> dict[Running, int]:
        for running in engine._active if not lost else ():
            if len(running.handle.tokens) > 4:
                lost.append(running.session.state.row.length)
                running.session.state.row.length = 0
        return prefill(engine)

    monkeypatch.setattr(Engine, "_prefill", losing)
    assert ours(model, inputs).tolist() == greedy(model, inputs).tolist()
    assert len(lost) == 1


# ------------------------------------------------------------------------------------------------- what must not pass


@pytest.mark.slow
@pytest.mark.parametrize("name", MULTIAXIAL)
def test_positions_behind_an_image(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With those of the tokens alone the text would be another one, which the comparison of logits refuses."""
    family, model = built(name)
    inputs = several(family)
    monkeypatch.setattr(hf_images, "_offsets", lambda positions, length, pads: [0] * len(pads))
    with pytest.raises(Refused, match=r"does not go on from this prompt as model\.generate does \(the logits after it"):
        ours(model, inputs)
    monkeypatch.setattr(hf_images.ReadPrompt, "check", lambda self, logits: None)
    assert ours(model, inputs).tolist() != greedy(model, inputs).tolist()


@pytest.mark.parametrize("name", ["qwen2_vl", pytest.param("llava", marks=pytest.mark.slow)])
def test_a_prompt_that_ends_within_an_image(name: str) -> None:
    family, model = built(name)
    with pytest.raises(Refused, match="ends within an image"):
        ours(model, family.inputs([*HEAD, Picture(1)]))


@pytest.mark.slow
def test_a_model_whose_text_attends_to_later_tokens() -> None:
    with pytest.raises(Refused, match="PaliGemmaForConditionalGeneration is no causal language model"):
        ours(PALIGEMMA.build(), one(PALIGEMMA))


def _hybrid() -> Any:
    vision = {**QWEN, "hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 16, "num_position_embeddings": 16}
    config = transformers.Qwen3_5Config(
        text_config={**SIZES, **BY_NAME["qwen3_5"].options}, vision_config=vision, **QWEN_IDS
    )
    torch.manual_seed(0)
    return sharpen(transformers.Qwen3_5ForConditionalGeneration(config).eval())


@pytest.mark.slow
def test_models_whose_prompts_are_more_than_entries() -> None:
    """Of a hybrid model the recurrent states would be missing."""
    model = _hybrid()
    with pytest.raises(Refused, match="cannot go on from a prompt that was read with images or sounds: not all"):
        ours(model, one(FAMILIES["qwen2_vl"]), "plain")


@pytest.mark.slow
def test_models_that_look_at_the_image_in_every_forward() -> None:
    sizes = {"attention_heads": 2, "image_size": 8, "patch_size": 4, "vision_output_dim": 32}
    text = {**TEXT, "cross_attention_layers": [1], "num_hidden_layers": 2, "bos_token_id": 1}
    vision = {**VISION, **sizes, "num_global_layers": 1, "intermediate_layers_indices": [0], "max_num_tiles": 1}
    config = transformers.MllamaConfig(
        text_config=text, vision_config={**vision, "supported_aspect_ratios": [[1, 1]]}, image_token_index=IMAGE
    )
    model = sharpen(transformers.MllamaForConditionalGeneration(config).eval())
    ids = torch.tensor([[5, IMAGE, 6, 7]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": torch.randn(1, 1, 1, 3, 8, 8)}
    inputs |= {"aspect_ratio_ids": torch.ones(1, 1).long(), "aspect_ratio_mask": torch.ones(1, 1, 1).long()}
    inputs["cross_attention_mask"] = torch.ones(1, 4, 1, 1).long()
    with pytest.raises(Refused, match="MllamaForConditionalGeneration cannot go on from a prompt that was read with"):
        ours(model, inputs, "plain")


@pytest.mark.slow
def test_hidden_states_of_the_prompt() -> None:
    _, model = built("llava")
    with hf_engine.engine_of(model) as kept, pytest.raises(Refused, match="a drafter that reads hidden states of the"):
        kept.target.open_entries([5, 6], SamplingParams(), PromptEntries({}), Capture(hidden=(1,)))


def test_targets_that_take_no_entries() -> None:
    with pytest.raises(Refused, match=r"toy.* takes no entries of prompts"):
        opened(ToyTarget(), [1, 2], SamplingParams(), PromptEntries({}))
