"""Linear layers in oneDNN's layout: the same products, what reads their weights, and which layers stay as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import heads
import numpy as np
import pytest
import torch
from architectures import BY_NAME
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration

from leapahead import LLM
from leapahead.check import check
from leapahead.core.errors import BadParameter, Refused
from leapahead.core.sampling import SamplingParams
from leapahead.drafters.heads import checkpoint
from leapahead.drafters.heads.load import load as load_head
from leapahead.models.loading import bundled
from leapahead.models.self_draft.int8 import Int8Linear, int8
from leapahead.models.transformers import linears, packing, weights
from leapahead.models.transformers.encoder_decoder import new_target
from leapahead.models.transformers.families import fingerprint
from leapahead.models.transformers.linears import PackedLinear, pack, unpack, weight_of
from leapahead.models.transformers.model import TransformersTarget
from leapahead.models.transformers.pretrained import load
from leapahead.models.transformers.twin import twin

pytestmark = pytest.mark.skipif(not linears.can_pack(), reason="this processor's bfloat16 is not oneDNN's")
PROMPT = "class Reader:\n    def read(self, size=-1):\n"


def model(name: str = "llama") -> Any:
    return BY_NAME[name].build().to(torch.bfloat16).eval()


def layers(module: nn.Module) -> list[PackedLinear]:
    return [each for each in module.modules() if isinstance(each, PackedLinear)]


@pytest.mark.parametrize("bias", [False, True])
def test_products_are_those_of_the_layer(bias: bool) -> None:
    linear = nn.Linear(96, 160, bias=bias, dtype=torch.bfloat16)
    packed = PackedLinear(linear, is_shared=False)
    for rows in (1, 2, 3, 8, 17, 130):
        x = torch.randn(1, rows, 96).to(torch.bfloat16)
        with torch.no_grad():
            expected = x.double() @ linear.weight.double().T + (linear.bias.double() if bias else 0)
            found = packed(x)
        assert found.shape == (1, rows, 160)
        assert found.dtype == torch.bfloat16
        # Rounding to the nearest of 8 bits, of a sum that is accumulated in float32.
        assert torch.allclose(found.double(), expected, rtol=2**-8, atol=1e-4)
    weight = weight_of(packed)
    assert weight is not None
    assert torch.equal(weight, linear.weight)


def test_a_packed_model_has_the_logits_and_the_identity_of_the_model() -> None:
    plain, packed = model(), model()
    tokens = torch.arange(2, 14)[None]
    assert packing.packed(packed)
    assert linears.is_packed(packed)
    assert not linears.is_packed(plain)
    assert not packing.packed(packed)  # all that can be packed is packed
    with torch.no_grad():
        before, after = plain(tokens).logits, packed(tokens).logits
    assert torch.allclose(before.float(), after.float(), atol=0.02 * float(before.float().std()))
    assert weights.digest(packed) == weights.digest(plain) != ""
    device = torch.device("cpu")
    # Forwards take another time.
    assert fingerprint(packed, device) == fingerprint(plain, device) + " packed"
    unpack(packed)
    assert vars(packed).keys() == vars(plain).keys()
    assert {key: each.tolist() for key, each in packed.state_dict().items()} == {
        key: each.tolist() for key, each in plain.state_dict().items()
    }


def test_a_weight_that_an_embedding_has_too_stays_there() -> None:
    tied = model()
    tied.lm_head.weight = tied.get_input_embeddings().weight
    pack(tied)
    embedding = tied.get_input_embeddings()
    assert isinstance(tied.lm_head, PackedLinear)
    assert type(embedding) is nn.Embedding
    assert weight_of(tied.lm_head) is embedding.weight
    assert linears.copied(tied) == embedding.weight.numel()
    copy = twin(tied)
    assert layers(copy)[0].weight is layers(tied)[0].weight  # a twin has no weights of its own
    unpack(tied)
    assert tied.lm_head.weight is embedding.weight


def test_what_is_left_alone() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    def of(layer: nn.Module) -> nn.Module:
        return nn.Sequential(layer)

    hooked = nn.Linear(8, 8, dtype=torch.bfloat16)
    hooked.register_forward_hook(lambda *_: None)
    twice = nn.Linear(8, 8, dtype=torch.bfloat16)
    assert pack(of(Scaled(8, 8, dtype=torch.bfloat16))) == 0
    assert pack(of(nn.Linear(8, 8))) == 0  # float32
    assert pack(of(nn.Linear(8, 8, dtype=torch.bfloat16, device="meta"))) == 0
    assert pack(of(hooked)) == 0
    shared = nn.Sequential(twice, twice)
    assert pack(shared) == 1
    assert shared[0] is shared[1]


def test_a_model_that_reads_its_weights_itself_is_unpacked() -> None:
    class Reading(nn.Linear):
        pass

    own = model()

    def forward(x: Tensor) -> Tensor:
        return nn.functional.linear(x, own.model.layers[0].mlp.up_proj.weight)

    reading = Reading(1, 1)
    reading.forward = forward  # type: ignore[method-assign, assignment]
    own.model.layers[1].mlp.up_proj = reading
    assert not packing.packed(own)
    assert not linears.is_packed(own)
    assert type(own.lm_head) is nn.Linear


def test_a_model_that_gives_other_logits_is_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    own = model()
    monkeypatch.setattr(PackedLinear, "forward", lambda self, x: x.new_zeros(*x.shape[:-1], self.out_features))
    assert not packing.packed(own)
    assert not linears.is_packed(own)


def test_models_of_the_user_are_not_changed() -> None:
    own = model()
    TransformersTarget(own, exclusive=False)
    LLM(own)
    assert not linears.is_packed(own)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.filterwarnings("ignore:the draft model")  # that it is too slow, by what has been measured
def test_texts(temperature: float) -> None:
    """Of every draft, where a draft model may be one whose layers are the target's own packed ones."""
    llm = LLM(dtype="bfloat16")
    assert linears.is_packed(llm.target.model)  # type: ignore[attr-defined]
    for drafters, options in (["auto", "lookahead"], {}), (["draft_model"], {"draft": "self:int8"}):
        report = check(
            llm.target,
            llm.tokenizer,
            [PROMPT],
            drafters,
            options=options,
            max_new_tokens=24,
            sampling=SamplingParams(temperature=temperature, seed=3),
        )
        assert all(not row.mismatches and row.tokens >= 20 for row in report.drafters)


def test_an_int8_draft_of_a_packed_model() -> None:
    target, _ = load(bundled(), dtype="bfloat16")
    draft = int8(target)
    assert any(isinstance(each, Int8Linear) for each in draft.model.modules())
    assert linears.is_packed(target.model)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"exact": True}, {"static": "compiled"}])
def test_other_ways_to_compute_forwards(options: dict[str, Any]) -> None:
    llm = LLM(dtype="bfloat16", **options)
    assert linears.is_packed(llm.target.model)  # type: ignore[attr-defined]
    texts = [llm.generate(PROMPT, max_new_tokens=48, drafter=drafter).tokens for drafter in ("plain", "auto")]
    assert texts[0] == texts[1]


def test_encoder_decoder_models() -> None:
    own = T5ForConditionalGeneration(
        T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0)
    )
    assert packing.packed(own.to(torch.bfloat16).eval())


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_NAME)
def test_every_architecture_can_do_packed_what_it_can_do_otherwise(name: str) -> None:
    own = model(name)

    def capabilities() -> object:
        try:
            return new_target(own, exclusive=True).info.capabilities
        except Refused as error:
            return str(error)

    before = capabilities()
    assert packing.packed(own) == linears.is_packed(own)  # a model that reads its weights itself stays as it was
    assert capabilities() == before


def test_the_option_is_of_named_models_of_transformers_only() -> None:
    with pytest.raises(BadParameter, match="pack=False can be set for a model of Transformers given by name"):
        LLM(model(), pack=False)
    with pytest.raises(BadParameter, match="pack='no' is not possible: it must be true or false"):
        LLM(bundled(), pack="no")


@pytest.mark.parametrize("kind", heads.LAYERS)
def test_a_head_is_packed_as_its_target_is(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "target"
    model().save_pretrained(folder)
    targets = [load(str(folder), dtype="bfloat16", pack=wanted)[0] for wanted in (True, False)]
    own = targets[1].model
    read = checkpoint.read(heads.write(tmp_path / kind, kind, own.config.vocab_size, size=own.config.hidden_size))
    packed, plain = (load_head(*read, target, "a head") for target in targets)
    assert not any(type(each) is nn.Linear for each in packed.module.modules())
    assert not linears.is_packed(plain.module)
    of_both = [each.latency.store.fingerprint for each in (packed, plain)]
    assert of_both[0] == of_both[1].replace(" of ", " packed of ") + " packed"
    tokens, path = [5, 6, 7, 8, 9], [3, 4]
    found, expected = (heads.recomputed(own, each.module, heads.LAYERS[kind], tokens, path) for each in (packed, plain))
    assert np.abs(found - expected).max() <= 0.05 * expected.std()
    if kind in ("eagle", "dflash", "dflash2"):  # whose output layer is the target's
        assert packed.module.lm_head is targets[0].model.lm_head
        assert torch.equal(plain.module.lm_head.weight, own.lm_head.weight)
