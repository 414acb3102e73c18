"""What the configuration of a trained head says, in every format that is read.

    speculators         config.json with "speculators_model_type" (eagle3, medusa, dflash, dspark, mtp)
    EAGLE               config.json of one Llama layer; EAGLE-3 with "draft_vocab_size"
    Medusa              config.json with "medusa_num_heads", or vLLM's with "model_type": "medusa"
    Hydra               config.json with "hydra_num_heads" (zankner/Hydra)
    DFlash              config.json with "dflash_config" (z-lab/dflash), with "causal_head" in it of JetSpec
                        (hao-ai-lab/JetSpec)
    PaSS, SPACE         config.json with "leapahead_probes", the format of this package; weights "embeddings.weight"

Imports no torch: shapes are given as tuples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from leapahead.core.errors import BadParameter, Refused

MEDUSA, EAGLE, EAGLE3, MTP = "medusa", "eagle", "eagle3", "mtp"
HYDRA, HYDRA_PREFIX = "hydra", "hydra++"
DFLASH, DSPARK = "dflash", "dspark"
PASS, SPACE = "pass", "space"
PROBES = (PASS, SPACE)  # rows of the target's own forward, with embeddings that were trained
KINDS = (MEDUSA, EAGLE, EAGLE3, HYDRA, HYDRA_PREFIX, DFLASH, DSPARK, MTP, *PROBES)
PROBE_TYPE = "leapahead_probes"
HYDRAS = (HYDRA, HYDRA_PREFIX)
FUSED = (EAGLE3, DFLASH, DSPARK)  # read the hidden states of several layers
VANILLA, GATED = "vanilla", "gated"  # DSpark's bias of the logits
TYPE = "speculators_model_type"
LAST = -1  # the last hidden state, after the final norm, as in `Capture.hidden`
DECODERS = ("llama",)  # model types of the decoder layers of EAGLE
HYDRA_ARCHITECTURES = {"mlp": HYDRA, "prefix-mlp": HYDRA_PREFIX}
# What a Qwen3 configuration means that leaves these out, where a Llama one means something else.
QWEN3 = {"vocab_size": 151936, "intermediate_size": 22016, "head_dim": 128, "num_key_value_heads": 32}
READ = (  # of DFlash's decoder layers
    "num_hidden_layers",
    "num_attention_heads",
    "hidden_act",
    "rms_norm_eps",
    "attention_bias",
    "rope_theta",
    "rope_parameters",
    "rope_scaling",
    "max_position_embeddings",
    *QWEN3,
)
Shapes = Mapping[str, tuple[int, ...]]  # tensor name -> shape


@dataclass(frozen=True)
class HeadConfig:
    """What a trained head is.

    Attributes:
        kind: one of `KINDS`.
        hidden_size: of the head.
        target_hidden_size: width of one hidden state of the target.
        vocab_size: of the target.
        draft_vocab_size: tokens that the head can propose; as many as `vocab_size` where it knows all.
        layers: the target's hidden states that it reads, numbered as in `Capture.hidden`; empty where the checkpoint
            leaves that to the target's number of layers (`layers_of`).
        depths: of Medusa and Hydra, the number of heads; of DFlash, how many tokens one forward predicts; of PaSS and
            SPACE, the probes of a group. 0 for EAGLE.
        blocks: of Medusa and Hydra, the number of residual layers of each head.
        bias: whether the linear layers in front have a bias: Medusa's and Hydra's residual layers, the others' `fc`.
        shared_output: of Medusa, whether all heads share one output layer.
        output_bias: of Hydra, whether the output layers have a bias.
        decoder: fields of a `LlamaConfig`, of the decoder layers, or of MTP of the configuration of its model type;
            None where it has none, and of Hydra++ where they are of the target's shape.
        norm_before_residual, norm_before_fc: variants of EAGLE-3: the state is normed before it enters the residual
            stream, and the target's states before they are fused.
        mask_token: of DFlash, the id of the mask token.
        from_anchor: of DFlash, whether the row of the last committed token predicts too, as DSpark's does.
        causal: of DFlash, whether the rows of a block see only those before them, as JetSpec's do.
        markov, markov_rank: of DSpark, what its bias of the logits is, "vanilla" or "gated", and its rank; "" for none.
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
    output_bias: bool = False
    mask_token: int = 0
    from_anchor: bool = False
    causal: bool = False
    markov: str = ""
    markov_rank: int = 0
    target: str = ""

    def layers_of(self, count: int) -> tuple[int, ...]:
        """The hidden states that it reads of a target with `count` layers.

        EAGLE-3's own are the outputs of layers 2, L/2 and L - 3.

        Raises:
            BadParameter: the target has no such layers.
        """
        if self.kind not in FUSED:
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
        if PROBE_TYPE in config:
            return _probes(config, shapes, where)
        if "hydra_num_heads" in config:
            return _hydra(config, shapes, where)
        if "dflash_config" in config:
            return _dflash(config, shapes, where)
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
        f"{where} holds no head that is known: expected a config.json with {TYPE!r}, 'medusa_num_heads', "
        f"'hydra_num_heads', 'dflash_config' or {PROBE_TYPE!r}, or weights with 'fc.weight' (EAGLE)"
    )


def _of_speculators(config: Mapping[str, Any], shapes: Shapes, where: str) -> HeadConfig:
    kind = config[TYPE]
    if kind == MEDUSA:
        return _medusa(config, shapes)
    if kind == MTP:
        return _mtp(config, config["transformer_layer_config"])
    if kind == EAGLE3:
        return _eagle(config, config["transformer_layer_config"], shapes)
    if kind in (DFLASH, DSPARK):
        return _dflash(config, shapes, where)
    raise Refused(f"{where} holds a head of kind {kind!r}, which is not supported; supported are {', '.join(KINDS)}")


def _probes(config: Mapping[str, Any], shapes: Shapes, where: str) -> HeadConfig:
    kind, depths, vocabulary = config[PROBE_TYPE], int(config["num_probes"]), int(config["vocab_size"])
    if kind not in PROBES:
        raise Refused(
            f"{where} holds probes of kind {kind!r}, which is not supported; supported are {', '.join(PROBES)}"
        )
    rows, hidden = shapes["embeddings.weight"]
    if depths < 1 or rows != (1 if kind == SPACE else depths):
        raise BadParameter(f"{where} has {rows} embeddings for num_probes={depths} of {kind}; the file is broken")
    target = str(config.get("base_model_name_or_path") or "")
    return HeadConfig(kind, hidden, hidden, vocabulary, vocabulary, depths=depths, target=target)


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


def _hydra(config: Mapping[str, Any], shapes: Shapes, where: str) -> HeadConfig:
    architecture = config.get("hydra_head_arch", "mlp")
    if architecture not in HYDRA_ARCHITECTURES:
        raise Refused(
            f"{where} holds Hydra heads of the architecture {architecture!r}, which is not supported; supported are "
            f"{', '.join(HYDRA_ARCHITECTURES)}"
        )
    for name, expected in (("grounded_heads", True), ("hidden_state_offset", 0)):
        if config.get(name, 0) != expected:
            raise Refused(
                f"{where} holds Hydra heads with {name}={config.get(name, 0)!r}, which is not supported; supported is "
                f"{expected!r}"
            )
    hidden, rows = shapes["blocks.0.0.linear.weight"][0], shapes["lm_heads.0.weight"][0]
    vocabulary = int(config["vocab_size"]) if "token_map" in shapes else rows
    decoder = config.get("transformer_layer_config")
    return HeadConfig(
        HYDRA_ARCHITECTURES[architecture],
        hidden,
        hidden,
        vocabulary,
        rows,
        depths=len({name.split(".")[1] for name in shapes if name.startswith("blocks.")}),
        blocks=len({name.split(".")[2] for name in shapes if name.startswith("blocks.0.")}),
        bias="blocks.0.0.linear.bias" in shapes,
        output_bias="lm_heads.0.bias" in shapes,
        decoder=None if decoder is None else dict(decoder),
        target=str(config.get("base_model_name_or_path") or ""),
    )


def _dflash(config: Mapping[str, Any], shapes: Shapes, where: str) -> HeadConfig:
    """DFlash's own ids count from the output of the first layer, those of speculators from the embedding."""
    own = config.get("dflash_config")
    kind = config.get(TYPE, DFLASH)
    decoder = config if own is not None else config["transformer_layer_config"]
    if (layer := decoder.get("model_type") or "qwen3") != "qwen3":
        raise Refused(f"{where} has decoder layers of type {layer!r}, which are not supported; supported is qwen3")
    if any(each != "full_attention" for each in decoder.get("layer_types") or ()):
        raise Refused(
            f"{where} has layers with sliding attention, which are not supported; supported are those with full "
            "attention (layer_types)"
        )
    layers = [each + 1 for each in own["target_layer_ids"]] if own else config["aux_hidden_state_layer_ids"]
    block = int(config.get("block_size") or (own or {})["block_size"])
    mask = config["mask_token_id"] if own is None else own["mask_token_id"]
    hidden, width = shapes["fc.weight"]
    decoder = {**QWEN3, **{name: decoder[name] for name in READ if decoder.get(name) is not None}}
    vocabulary = int(decoder["vocab_size"])
    rows = shapes["lm_head.weight"][0] if "lm_head.weight" in shapes else 0
    if not 0 <= int(mask) < vocabulary or block < 2:
        raise BadParameter(
            f"{where} has mask_token_id={mask} and block_size={block}, which is not possible with a vocabulary of "
            f"{vocabulary}; the file is broken"
        )
    anchor = bool(config.get("sample_from_anchor", kind == DSPARK))
    rank = shapes["markov_head.markov_w1.weight"][1] if "markov_head.markov_w1.weight" in shapes else 0
    markov = str(config.get("markov_head_type", VANILLA)) if rank else ""
    if markov not in ("", VANILLA, GATED):
        raise Refused(
            f"{where} has markov_head_type={markov!r}, which is not supported; supported are {VANILLA} and {GATED}"
        )
    return HeadConfig(
        kind,
        hidden,
        width // max(1, len(layers)),
        vocabulary,
        rows or int(config.get("draft_vocab_size") or vocabulary),
        tuple(int(each) for each in layers),
        depths=block if anchor else block - 1,
        bias="fc.bias" in shapes,
        decoder=decoder,
        mask_token=int(mask),
        from_anchor=anchor,
        causal=bool((own or {}).get("causal_head", False)),
        markov=markov,
        markov_rank=rank,
        target=_verifier(config),
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
