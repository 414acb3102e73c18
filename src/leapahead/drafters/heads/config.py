"""What the configuration of a trained head says, in every format that is read.

    speculators         config.json with "speculators_model_type" (eagle3, medusa, mtp)
    EAGLE               config.json of one Llama layer; EAGLE-3 with "draft_vocab_size"
    Medusa              config.json with "medusa_num_heads", or vLLM's with "model_type": "medusa"

Imports no torch: shapes are given as tuples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from leapahead.core.errors import BadParameter, Refused

MEDUSA, EAGLE, EAGLE3, MTP = "medusa", "eagle", "eagle3", "mtp"
KINDS = (MEDUSA, EAGLE, EAGLE3, MTP)
TYPE = "speculators_model_type"
LAST = -1  # the last hidden state, after the final norm, as in `Capture.hidden`
DECODERS = ("llama",)  # model types of the decoder layers of EAGLE
Shapes = Mapping[str, tuple[int, ...]]  # tensor name -> shape


@dataclass(frozen=True)
class HeadConfig:
    """What a trained head is.

    Attributes:
        kind: "medusa", "eagle", "eagle3" or "mtp".
        hidden_size: of the head.
        target_hidden_size: width of one hidden state of the target.
        vocab_size: of the target.
        draft_vocab_size: tokens that the head can propose; as many as `vocab_size` where it knows all.
        layers: the target's hidden states that it reads, numbered as in `Capture.hidden`; empty where the checkpoint
            leaves that to the target's number of layers (`layers_of`).
        depths: of Medusa, the number of heads: how many tokens one forward predicts. 0 for EAGLE.
        blocks: of Medusa, the number of residual layers of each head.
        bias: whether the linear layers in front have a bias: Medusa's residual layers, EAGLE's `fc`.
        shared_output: of Medusa, whether all heads share one output layer.
        decoder: fields of a `LlamaConfig`, of EAGLE's layers; of MTP, of the configuration of its model type.
        norm_before_residual, norm_before_fc: variants of EAGLE-3: the state is normed before it enters the residual
            stream, and the target's states before they are fused.
        target: name of the model that the head was trained for; "" where the checkpoint does not say.
    """

    kind: str
    hidden_size: int
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    layers: tuple[int, ...] = ()
    depths: int = 0
    blocks: int = 1
    bias: bool = False
    shared_output: bool = False
    decoder: Mapping[str, Any] | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    target: str = ""

    def layers_of(self, count: int) -> tuple[int, ...]:
        """The hidden states that it reads of a target with `count` layers.

        EAGLE-3's own are the outputs of layers 2, L/2 and L - 3.

        Raises:
            BadParameter: the target has no such layers.
        """
        if self.kind != EAGLE3:
            return (LAST,)
        layers = self.layers or (2, count // 2, count - 3)
        if max(layers) > count or len(set(layers)) < len(layers):
            raise BadParameter(
                f"the head reads the hidden states of layers {', '.join(map(str, layers))}, and the target has {count} "
                "layers; use a head that was trained for this target"
            )
        return layers


def parse(config: Mapping[str, Any], shapes: Shapes, where: str) -> HeadConfig:
    """The configuration of a head.

    Args:
        config: the content of its `config.json`.
        shapes: of its tensors, by the names of `names.canonical`.
        where: the folder, for messages.

    Raises:
        BadParameter: a field is missing or impossible, or no head is described.
        Refused: a kind of head that is not supported.
    """
    try:
        if TYPE in config:
            return _of_speculators(config, shapes, where)
        if "medusa_num_heads" in config or config.get("model_type") == MEDUSA or "blocks.0.layers.0.weight" in shapes:
            return _medusa(config, shapes)
        if "fc.weight" in shapes:
            return _eagle(config, config, shapes)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, (BadParameter, Refused)):
            raise
        raise BadParameter(
            f"{where} is no usable head: its config.json or its tensors lack what is needed ({error!r}); expected a "
            f"head of kind {', '.join(KINDS)}"
        ) from error
    raise BadParameter(
        f"{where} holds no head that is known: expected a config.json with {TYPE!r} or 'medusa_num_heads', or weights "
        "with 'fc.weight' (EAGLE)"
    )


def _of_speculators(config: Mapping[str, Any], shapes: Shapes, where: str) -> HeadConfig:
    kind = config[TYPE]
    if kind == MEDUSA:
        return _medusa(config, shapes)
    if kind == MTP:
        return _mtp(config, config["transformer_layer_config"])
    if kind == EAGLE3:
        return _eagle(config, config["transformer_layer_config"], shapes)
    raise Refused(f"{where} holds a head of kind {kind!r}, which is not supported; supported are {', '.join(KINDS)}")


def _medusa(config: Mapping[str, Any], shapes: Shapes) -> HeadConfig:
    """The tensors decide where the file contradicts them: published ones say 2 heads and have 5."""
    depths = len({name.split(".")[1] for name in shapes if name.startswith("blocks.")})
    blocks = len({name.split(".")[3] for name in shapes if name.startswith("blocks.0.layers.")})
    hidden = shapes["blocks.0.layers.0.weight"][0]
    rows = shapes["lm_heads.0.weight"][0] if "lm_heads.0.weight" in shapes else 0
    vocabulary = config.get("medusa_vocab_size") or config.get("vocab_size") or 0
    mapped = shapes["token_map"][0] if "token_map" in shapes else 0
    return HeadConfig(
        MEDUSA,
        hidden,
        hidden,
        int(vocabulary) if mapped else int(rows or vocabulary),
        mapped or rows or int(vocabulary),
        depths=depths,
        blocks=blocks,
        bias="blocks.0.layers.0.bias" in shapes,
        shared_output=depths > 1 and "lm_heads.1.weight" not in shapes,
        target=str(config.get("base_model_name_or_path") or _verifier(config)),
    )


def _eagle(config: Mapping[str, Any], decoder: Mapping[str, Any], shapes: Shapes) -> HeadConfig:
    """EAGLE-3's layer reads embedding and state side by side; EAGLE-1's `fc` has joined them before."""
    kind = decoder.get("model_type") or "llama"
    if kind not in DECODERS:
        raise Refused(f"the head has decoder layers of type {kind!r}, which are not supported; supported is llama")
    hidden, width = shapes["fc.weight"]
    third = shapes["layers.0.self_attn.q_proj.weight"][1] == 2 * hidden
    layers = tuple(int(layer) for layer in config.get("eagle_aux_hidden_state_layer_ids") or ())
    count = len(layers) or 3
    rows = shapes["lm_head.weight"][0] if "lm_head.weight" in shapes else 0
    vocabulary = int(decoder["vocab_size"])
    return HeadConfig(
        EAGLE3 if third else EAGLE,
        hidden,
        width // count if third else width - hidden,
        vocabulary,
        rows or int(config.get("draft_vocab_size") or vocabulary),
        layers[:count],
        bias="fc.bias" in shapes,
        decoder={name: value for name, value in decoder.items() if name != "architectures"},
        norm_before_residual=bool(config.get("norm_before_residual", False)),
        norm_before_fc="input_norm.weight" in shapes,
        target=_verifier(config),
    )


def _mtp(config: Mapping[str, Any], decoder: Mapping[str, Any]) -> HeadConfig:
    """One module, whose embedding and output layer are the target's."""
    if (count := config.get("num_nextn_predict_layers", 1)) != 1:
        raise Refused(f"the head has {count} MTP modules, and heads of speculators with one are supported")
    size, vocabulary = int(decoder["hidden_size"]), int(decoder["vocab_size"])
    return HeadConfig(MTP, size, size, vocabulary, vocabulary, decoder=dict(decoder), target=_verifier(config))


def _verifier(config: Mapping[str, Any]) -> str:
    found = config.get("speculators_config") or {}
    return str((found.get("verifier") or {}).get("name_or_path") or "")
