"""Stand-ins in the shapes of a hybrid: attention in a few layers, Mamba-2 in all others (GraniteMoeHybrid, dense).

The layers with attention are those of `research.widening`, spread evenly among the recurrent ones; they hold the
source's layers. Where the published model has fewer layers with attention than the source has layers, the stand-in has
as many as the source. All layers have a feed-forward network, which adds zero in recurrent layers.

A recurrent layer is random: it reads the normalised residual of the source (unit variance), its projections have unit
variance, and the rest is as Mamba-2 is initialised: time steps from 0.001 to 0.1, A from -1 to -16, a convolution
uniform within 1/sqrt(kernel). Decays are below one, so that states stay bounded. Its output is not zero but small: per
entry, `SHARE` of the standard deviation of the embedding. So a wrong state changes the logits, and the text hardly
changes.

The bundled model at the cost of hybrid-135m, beside the stand-in of 135m and the source itself, on 20 prompts of GSM8K
and greedy texts of 64 tokens; differences of the logits are over their standard deviation:

    compared with the source in bfloat16                       hybrid-135m   135m     the source in float32
    rms difference of the logits, Transformers, bfloat16       9.1e-3        8.1e-3
    largest logit is the text's next token, given the others   0.981         0.985    0.981
    equal tokens, each text free, Transformers, bfloat16       0.75          0.80     0.68
    equal tokens, each text free, llama.cpp, bf16; q8_0        0.89; 0.79    0.96; 0.76

In float32 the recurrent layers move the logits by 2.4e-3 (rms; 0.02 at most), and 0.997 of the largest logits remain.
With the recurrent states of one token before, the logits of the next tokens are off by 7.5e-3 in bfloat16, where right
states, cached, are off by 1.1e-3. In llama.cpp's F32 file the logits are within 1.5e-4 (rms) of Transformers' in
float32, with a KV cache in F16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from research.widening import Planned, Recurrent, Shapes, Widening, spread

SHARE = 0.003
TIME_STEPS = (0.001, 0.1)
RATES = (1.0, 16.0)  # of A


class HybridWidening(Widening):
    """Plans every tensor of a stand-in for a hybrid."""

    def __init__(self, small: Shapes, large: Shapes, tied: bool, seed: int) -> None:
        super().__init__(small, large, tied, seed)
        assert large.recurrent is not None
        self.own: Recurrent = large.recurrent

    def _layer(self, layer: int, origin: int, filled: bool) -> Iterator[Planned]:
        """A layer of the Llama, its feed-forward network renamed and its attention replaced where it is recurrent."""
        at = f"model.layers.{layer}."
        mlp: dict[str, Planned] = {}
        for tensor in super()._layer(layer, origin, filled):
            if ".mlp." in tensor.name:
                mlp[tensor.name.split(".")[-2]] = tensor
            elif layer in self.attention:
                yield tensor
            elif ".self_attn." not in tensor.name:
                yield tensor if "post" in tensor.name else self._made(tensor.name, (self.large.hidden,), self._plain)
        if layer not in self.attention:
            yield from self._mamba(f"{at}mamba.")
        gate, up, down = mlp["gate_proj"], mlp["up_proj"], mlp["down_proj"]
        yield Planned(
            f"{at}shared_mlp.input_linear.weight",
            (2 * self.large.intermediate, self.large.hidden),
            gate.origins + up.origins,
            lambda first, second: torch.cat([gate.make(first), up.make(second)]),
        )
        yield Planned(f"{at}shared_mlp.output_linear.weight", down.shape, down.origins, down.make)

    def _mamba(self, at: str) -> Iterator[Planned]:
        own, hidden = self.own, self.large.hidden
        rows, bound = own.inner + own.convolved + own.heads, own.kernel**-0.5

        def uniform(low: float, high: float, *shape: int) -> Tensor:
            return low + (high - low) * torch.rand(shape, generator=self.generator)

        def time_step_bias() -> Tensor:
            steps = uniform(math.log(TIME_STEPS[0]), math.log(TIME_STEPS[1]), own.heads).exp()
            return steps + (-torch.expm1(-steps)).log()  # the inverse of softplus

        def output(embedding: Tensor) -> Tensor:
            weight = torch.randn(self.small.hidden, own.inner, generator=self.generator)
            return self._copied(weight * (SHARE * embedding.std() * own.inner**-0.5))

        yield self._made(
            f"{at}in_proj.weight",
            (rows, hidden),
            lambda: torch.randn(rows, hidden, generator=self.generator) * self.small.hidden**-0.5,
        )
        yield self._made(
            f"{at}conv1d.weight",
            (own.convolved, 1, own.kernel),
            lambda: uniform(-bound, bound, own.convolved, 1, own.kernel),
        )
        yield self._made(f"{at}conv1d.bias", (own.convolved,), lambda: uniform(-bound, bound, own.convolved))
        yield self._made(f"{at}dt_bias", (own.heads,), time_step_bias)
        yield self._made(f"{at}A_log", (own.heads,), lambda: uniform(*RATES, own.heads).log())
        yield self._made(f"{at}D", (own.heads,), lambda: torch.ones(own.heads))
        yield self._made(f"{at}norm.weight", (own.inner,), lambda: torch.ones(own.inner))
        yield Planned(f"{at}out_proj.weight", (hidden, own.inner), ("model.embed_tokens.weight",), output)

    def _made(self, name: str, shape: tuple[int, ...], make: Callable[[], Tensor]) -> Planned:
        """A tensor that needs nothing of the source."""
        return Planned(name, shape, (), make)

    def _plain(self) -> Tensor:
        """The weights of a norm after which the source's entries of the residual have unit variance."""
        return self._norm(torch.ones(self.small.hidden))


def config(shapes: Shapes) -> dict[str, Any]:
    """What config.json of a hybrid has beside a Llama's."""
    own = shapes.recurrent
    assert own is not None
    attention = spread(shapes.attention, shapes.layers)
    return {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "layer_types": ["attention" if layer in attention else "mamba" for layer in range(shapes.layers)],
        "position_embedding_type": "rope",
        "shared_intermediate_size": shapes.intermediate,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "attention_multiplier": shapes.head_dim**-0.5,
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "mamba_chunk_size": own.chunk,
        "mamba_conv_bias": True,
        "mamba_d_conv": own.kernel,
        "mamba_d_head": own.head_dim,
        "mamba_d_state": own.state,
        "mamba_expand": own.inner // shapes.hidden,
        "mamba_n_groups": 1,
        "mamba_n_heads": own.heads,
        "mamba_proj_bias": False,
    }
