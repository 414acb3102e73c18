"""What a trained head is; `formats` reads it from the files of a head. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from leapahead.core.errors import BadParameter

MEDUSA, EAGLE, EAGLE3, PEAGLE, MTP = "medusa", "eagle", "eagle3", "peagle", "mtp"
HYDRA, HYDRA_PREFIX = "hydra", "hydra++"
DFLASH, DFLASH2, DSPARK = DFLASHES = ("dflash", "dflash2", "dspark")
PASS, SPACE = "pass", "space"
PROBES = (PASS, SPACE)  # rows of the target's own forward, with embeddings that were trained
KINDS = (MEDUSA, EAGLE, EAGLE3, PEAGLE, HYDRA, HYDRA_PREFIX, DFLASH, DFLASH2, DSPARK, MTP, *PROBES)
PROBE_TYPE = "leapahead_probes"
HYDRAS = (HYDRA, HYDRA_PREFIX)
FUSED = (EAGLE3, PEAGLE, *DFLASHES)  # read the hidden states of several layers
VANILLA, GATED = "vanilla", "gated"  # DSpark's bias of the logits
TYPE = "speculators_model_type"
MOST_DEPTHS = 256  # that a head predicts: of the drafted nodes of a step there are no more (`planner.sizing.MOST`)
LAST = -1  # the last hidden state, after the final norm, as in `Capture.hidden`
HYDRA_ARCHITECTURES = {"mlp": HYDRA, "prefix-mlp": HYDRA_PREFIX}


@dataclass(frozen=True)
class HeadConfig:
    """What a trained head is, of any kind. MTP modules and probes have no more than this.

    Attributes:
        kind: one of `KINDS`.
        hidden_size: of the head.
        target_hidden_size: width of one hidden state of the target.
        vocab_size: of the target.
        draft_vocab_size: tokens that the head can propose; as many as `vocab_size` where it knows all.
        layers: the target's hidden states that it reads, numbered as in `Capture.hidden`; empty where the checkpoint
            leaves that to the target's number of layers (`layers_of`).
        depths: of Medusa and Hydra, the number of heads; of DFlash and P-EAGLE, how many tokens one forward predicts;
            of PaSS and SPACE, the probes of a group. 0 for EAGLE.
        decoder: fields of a `LlamaConfig`, of the decoder layers, or of MTP of the configuration of its model type;
            None where it has none, and of Hydra++ where they are of the target's shape.
        target: name of the model that the head was trained for; "" where the checkpoint does not say.
    """

    kind: str
    hidden_size: int
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    layers: tuple[int, ...] = ()
    depths: int = 0
    decoder: Mapping[str, Any] | None = None
    target: str = ""

    def layers_of(self, count: int, remedy: str = "use a head that was trained for this target") -> tuple[int, ...]:
        """The hidden states that it reads of a target with `count` layers.

        EAGLE-3's own are the outputs of layers 2, L/2 and L - 3.

        Args:
            remedy: the end of the message where there are no such layers.

        Raises:
            BadParameter: the target has no such layers.
        """
        if self.kind not in FUSED:
            return (LAST,)
        layers = self.layers or (2, count // 2, count - 3)
        named = f"the head reads the hidden states of layers {', '.join(map(str, layers))}"
        if max(layers) > count or min(layers) < LAST:
            raise BadParameter(f"{named}, and the target has {count} layers; {remedy}")
        if len(set(layers)) < len(layers):
            raise BadParameter(f"{named}, of which one is named twice; {remedy}")
        return layers


@dataclass(frozen=True)
class BlocksConfig(HeadConfig):
    """Medusa and Hydra.

    Attributes:
        blocks: residual layers of each head.
        bias: whether these have a bias.
        shared_output: of Medusa, whether all heads share one output layer.
        output_bias: of Hydra, whether the output layers have a bias.
    """

    blocks: int = 1
    bias: bool = False
    shared_output: bool = False
    output_bias: bool = False


@dataclass(frozen=True)
class EagleConfig(HeadConfig):
    """EAGLE, EAGLE-3 and P-EAGLE.

    Attributes:
        bias: whether `fc`, which joins what the head reads, has a bias.
        norm_before_residual, norm_before_fc, fc_norm, norm_output, norms_heads: what else is normed in EAGLE-3: the
            state before it enters the residual stream; the target's states before they are fused, together or each
            alone; the state that a row hands on; queries and keys, as in Qwen3's layers.
        mask_token: of P-EAGLE, the id of the mask token.
    """

    bias: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    norms_heads: bool = False
    mask_token: int = 0


@dataclass(frozen=True)
class DFlashConfig(HeadConfig):
    """DFlash, JetSpec and DSpark.

    Attributes:
        bias: whether `fc`, which joins the target's states, has a bias.
        mask_token: id of the mask token.
        from_anchor: whether the row of the last committed token predicts too, as DSpark's does.
        causal: whether the rows of a block see only those before them, as JetSpec's do.
        sliding: the layers with sliding attention.
        window: how many of the last committed tokens they see.
        sliding_causal: whether in these layers the rows of a block see only those before them.
        markov, markov_rank: what DSpark's bias of the logits is, "vanilla" or "gated", and its rank; "" for none.
    """

    bias: bool = False
    mask_token: int = 0
    from_anchor: bool = False
    causal: bool = False
    sliding: tuple[int, ...] = ()
    window: int = 0
    sliding_causal: bool = False
    markov: str = ""
    markov_rank: int = 0

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return self.depths + (not self.from_anchor)

    @property
    def is_chained(self) -> bool:
        """Whether candidates depend on the token before them."""
        return bool(self.markov)


@dataclass(frozen=True, kw_only=True)
class DFlash2Config(DFlashConfig):
    """DFlash 2.

    Attributes:
        candidates, selector_rank: the likeliest tokens that the selector scores, and its rank.
        taps, group: rows that a convolution adds up, and channels that have the same change.
        embedding_scale, output_scale, softcap: by what embeddings and logits are multiplied, and the bound of the
            logits; 0 for none.
    """

    candidates: int
    selector_rank: int
    taps: int
    group: int
    embedding_scale: float = 1.0
    output_scale: float = 1.0
    softcap: float = 0.0

    @property
    def is_chained(self) -> bool:
        return True
