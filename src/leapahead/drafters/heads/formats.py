"""How the configuration of a trained head is read, in every format that is published.

    speculators         config.json with "speculators_model_type" (eagle3, peagle, medusa, dflash,
                        dflash2, dspark, mtp)
    EAGLE               config.json of one Llama layer; EAGLE-3 with "draft_vocab_size", and with "eagle_config" where
                        SpecForge trained it; P-EAGLE with "ptd_token_id"
    Medusa              config.json with "medusa_num_heads", or vLLM's with "model_type": "medusa"
    Hydra               config.json with "hydra_num_heads" (zankner/Hydra)
    DFlash              config.json with "dflash_config" (z-lab/dflash), with "selector_top_k" in it of DFlash 2, and
                        with "causal_head" of JetSpec (hao-ai-lab/JetSpec)
    PaSS, SPACE         config.json with "leapahead_probes", the format of this package; weights "embeddings.weight"

Imports no torch: shapes are given as tuples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from leapahead.core.errors import BadParameter, Refused
from leapahead.drafters.heads.config import (
    DFLASH,
    DFLASH2,
    DFLASHES,
    DSPARK,
    EAGLE,
    EAGLE3,
    GATED,
    HYDRA_ARCHITECTURES,
    KINDS,
    MEDUSA,
    MOST_DEPTHS,
    MTP,
    PEAGLE,
    PROBE_TYPE,
    PROBES,
    SPACE,
    TYPE,
    VANILLA,
    BlocksConfig,
    DFlash2Config,
    DFlashConfig,
    EagleConfig,
    HeadConfig,
)

DECODERS = ("llama", "qwen3")  # model types of the decoder layers of EAGLE
# What a Qwen3 configuration means that leaves these out, where a Llama one means something else.
QWEN3 = {"vocab_size": 151936, "intermediate_size": 22016, "head_dim": 128, "num_key_value_heads": 32}
READ = (  # of Qwen3's decoder layers
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
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
MASKS = ("mask_token_id", "ptd_token_id", "pard_token")  # names of P-EAGLE's mask token
FULL, SLIDING = "full_attention", "sliding_attention"
Shapes = Mapping[str, tuple[int, ...]]  # tensor name -> shape


def parse(config: Mapping[str, Any], shapes: Shapes, where: str) -> HeadConfig:
    """The configuration of a head.

    Args:
        config: the content of its `config.json`.
        shapes: of its tensors, by the names of `checkpoint.canonical`.
        where: the folder, for messages.

    Raises:
        BadParameter: a field is missing or impossible, or no head is described.
        Refused: a kind of head that is not supported.
    """
    try:
        if (found := _parsed(config, shapes, where)) is not None:
            _check_sizes(found, shapes, where)
            return found
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, StopIteration) as error:
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


def _parsed(config: Mapping[str, Any], shapes: Shapes, where: str) -> HeadConfig | None:
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
    return _eagle(config, config, shapes, where) if "fc.weight" in shapes else None


def _check_sizes(found: HeadConfig, shapes: Shapes, where: str) -> None:
    """Refuses numbers that no tensor bounds, before a network of this size is made."""
    if found.depths > MOST_DEPTHS:
        raise BadParameter(
            f"{where} predicts {found.depths} tokens ahead, which is not possible: at most {MOST_DEPTHS} are drafted; "
            "the file is broken"
        )
    if isinstance(found, (EagleConfig, DFlashConfig)) and found.decoder is not None:
        layers = len({name.split(".")[1] for name in shapes if name.startswith("layers.")})
        if (count := found.decoder.get("num_hidden_layers")) is not None and int(count) != layers:
            raise BadParameter(
                f"{where} has num_hidden_layers={count} in its config.json, and tensors of {layers} layers; the file "
                "is broken"
            )


def _of_speculators(config: Mapping[str, Any], shapes: Shapes, where: str) -> HeadConfig:
    kind = config[TYPE]
    if kind == MEDUSA:
        return _medusa(config, shapes)
    if kind == MTP:
        return _mtp(config, config["transformer_layer_config"])
    if kind in (EAGLE3, PEAGLE):
        return _eagle(config, config["transformer_layer_config"], shapes, where)
    if kind in DFLASHES:
        return _dflash(config, shapes, where)
    raise Refused(
        f"{where} holds a head of kind {kind!r} in the format of speculators, which is not supported; supported in "
        f"this format are {', '.join((MEDUSA, EAGLE3, PEAGLE, *DFLASHES, MTP))}"
    )


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


def _medusa(config: Mapping[str, Any], shapes: Shapes) -> BlocksConfig:
    """The tensors decide where the file contradicts them: published ones say 2 heads and have 5."""
    depths = len({name.split(".")[1] for name in shapes if name.startswith("blocks.")})
    blocks = len({name.split(".")[3] for name in shapes if name.startswith("blocks.0.layers.")})
    hidden = shapes["blocks.0.layers.0.weight"][0]
    rows = shapes["lm_heads.0.weight"][0] if "lm_heads.0.weight" in shapes else 0
    vocabulary = config.get("medusa_vocab_size") or config.get("vocab_size") or 0
    mapped = shapes["token_map"][0] if "token_map" in shapes else 0
    return BlocksConfig(
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


def _hydra(config: Mapping[str, Any], shapes: Shapes, where: str) -> BlocksConfig:
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
    return BlocksConfig(
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


def _dflash(config: Mapping[str, Any], shapes: Shapes, where: str) -> DFlashConfig:
    """DFlash's own ids count from the output of the first layer, those of speculators from the embedding."""
    own = config.get("dflash_config")
    kind = config.get(TYPE) or (DFLASH2 if "selector_top_k" in (own or {}) else DFLASH)
    decoder = config if own is not None else config["transformer_layer_config"]
    if (layer := decoder.get("model_type") or "qwen3") != "qwen3":
        raise Refused(f"{where} has decoder layers of type {layer!r}, which are not supported; supported is qwen3")
    sliding = _sliding(config, decoder, kind, where)
    layers = [each + 1 for each in own["target_layer_ids"]] if own else config["aux_hidden_state_layer_ids"]
    block = int(config.get("block_size") or (own or {})["block_size"])
    mask = config["mask_token_id"] if own is None else own["mask_token_id"]
    hidden, width = shapes["fc.weight"]
    decoder = _qwen3(decoder)
    vocabulary = int(decoder["vocab_size"])
    rows = shapes["lm_head.weight"][0] if "lm_head.weight" in shapes else 0
    if not 0 <= int(mask) < vocabulary or block < 2:
        raise BadParameter(
            f"{where} has mask_token_id={mask} and block_size={block}, which is not possible with a vocabulary of "
            f"{vocabulary}; the file is broken"
        )
    anchor = bool(config.get("sample_from_anchor", kind == DSPARK))
    found = DFlashConfig(
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
        target=_verifier(config),
        **sliding,
        **_markov(config, shapes, where),
    )
    return _selector(own or config, found, shapes, where) if kind == DFLASH2 else found


def _sliding(config: Mapping[str, Any], decoder: Mapping[str, Any], kind: str, where: str) -> dict[str, Any]:
    """Which of DFlash's layers have sliding attention, and how it is masked within a block."""
    types = decoder.get("layer_types") or ()
    if unknown := sorted({*types} - {FULL, SLIDING}):
        raise Refused(
            f"{where} has layers of type {unknown[0]!r}, which are not supported; supported are {FULL} and {SLIDING}"
        )
    window = decoder.get("sliding_window")
    layers = tuple(place for place, each in enumerate(types) if each == SLIDING)
    if not layers or window is None or not decoder.get("use_sliding_window", True):
        return {}
    if int(window) < 1:
        raise BadParameter(f"{where} has sliding_window={window}, which is not possible; the file is broken")
    free = "dflash_config" in config or config.get("sliding_window_non_causal", kind == DFLASH2)
    return {"sliding": layers, "window": int(window), "sliding_causal": not free}


def _markov(config: Mapping[str, Any], shapes: Shapes, where: str) -> dict[str, Any]:
    """DSpark's bias of the logits."""
    if (name := "markov_head.markov_w1.weight") not in shapes:
        return {}
    kind = str(config.get("markov_head_type", VANILLA))
    if kind not in (VANILLA, GATED):
        raise Refused(
            f"{where} has markov_head_type={kind!r}, which is not supported; supported are {VANILLA} and {GATED}"
        )
    return {"markov": kind, "markov_rank": shapes[name][1]}


def _selector(given: Mapping[str, Any], found: DFlashConfig, shapes: Shapes, where: str) -> DFlash2Config:
    """The convolutions and the selector of DFlash 2; the tensors tell their sizes.

    Args:
        given: where the configuration has its fields.
        found: what DFlash has of it too.
        shapes, where: see `parse`.
    """
    if (form := given.get("draft_ffn_type", "dense")) != "dense":
        raise Refused(f"{where} has draft_ffn_type={form!r}, which is not supported; supported is 'dense'")
    if found.draft_vocab_size != found.vocab_size:
        raise Refused(
            f"{where} proposes {found.draft_vocab_size} of {found.vocab_size} tokens, which is not supported in "
            f"{DFLASH2}; supported are heads that can propose all"
        )
    _, taps, size = shapes["layers.0.attention_conv.base_kernel"]
    groups = shapes["layers.0.attention_conv.kernel_projection.weight"][0] // (2 * taps)
    count = int(given.get("selector_top_k", 16))
    if not 1 <= taps <= found.rows or not groups or size % groups or not 1 <= count <= found.vocab_size:
        raise BadParameter(
            f"{where} has convolutions of {taps} taps in {groups} groups of {size} channels, selector_top_k={count}, "
            f"blocks of {found.rows} and {found.vocab_size} tokens, which is not possible; the file is broken"
        )
    return DFlash2Config(
        **vars(found),
        candidates=count,
        selector_rank=shapes["candidate_selector.predecessor_codebook"][1],
        taps=taps,
        group=size // groups,
        embedding_scale=float(given.get("input_embedding_scale") or 1.0),
        output_scale=float(given.get("output_multiplier") or 1.0),
        softcap=float(given.get("final_logit_softcapping") or 0.0),
    )


def _eagle(config: Mapping[str, Any], decoder: Mapping[str, Any], shapes: Shapes, where: str) -> EagleConfig:
    """EAGLE-3's layer reads embedding and state side by side; EAGLE-1's `fc` has joined them before."""
    kind = decoder.get("model_type") or "llama"
    if kind not in DECODERS:
        raise Refused(
            f"the head has decoder layers of type {kind!r}, which are not supported; supported are "
            f"{', '.join(DECODERS)}"
        )
    if SLIDING in (decoder.get("layer_types") or ()) and decoder.get("use_sliding_window", True):
        raise Refused(
            f"the head has layers of type {SLIDING!r}, which are not supported in EAGLE; supported is {FULL!r}"
        )
    hidden, width = shapes["fc.weight"]
    third = shapes["layers.0.self_attn.q_proj.weight"][1] == 2 * hidden
    layers = _layers(config)
    count = len(layers) or 3
    rows = shapes["lm_head.weight"][0] if "lm_head.weight" in shapes else 0
    vocabulary = int(decoder["vocab_size"])
    found = EagleConfig(
        EAGLE3 if third else EAGLE,
        hidden,
        width // count if third else width - hidden,
        vocabulary,
        rows or int(config.get("draft_vocab_size") or vocabulary),
        layers[:count],
        bias="fc.bias" in shapes,
        decoder=_qwen3(decoder) if kind == "qwen3" else {k: v for k, v in decoder.items() if k != "architectures"},
        norm_before_residual=bool(config.get("norm_before_residual", False)),
        norm_before_fc="input_norm.weight" in shapes,
        fc_norm="fc_norm.0.weight" in shapes,
        norm_output=bool(config.get("norm_output", False)),
        norms_heads="layers.0.self_attn.q_norm.weight" in shapes,
        target=_verifier(config),
    )
    return _parallel(config, found, where) if "mask_hidden" in shapes or config.get(TYPE) == PEAGLE else found


def _layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The target's hidden states that EAGLE-3 reads; empty for the default ones.

    The ids under "eagle_config" have two numberings, and the file does not say which. SpecForge counts the outputs of
    layers from 0, and its own lists begin with 1. Others number like the default ones and like speculators, where 0
    would be the embeddings; their known lists begin with 2 or later. So the first id decides.
    """
    if ids := config.get(LAYER_IDS):
        return tuple(int(layer) for layer in ids)
    nested = [int(layer) for layer in (config.get("eagle_config") or {}).get(LAYER_IDS) or ()]
    return tuple(layer + (nested[0] < 2) for layer in nested)


def _parallel(config: Mapping[str, Any], found: EagleConfig, where: str) -> EagleConfig:
    """P-EAGLE: an EAGLE-3 with a mask token; its own files name the token otherwise than speculators."""
    mask = int(next(config[name] for name in MASKS if config.get(name) is not None))
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    depths = int(methods[0].get("speculative_tokens") or 8)
    if not 0 <= mask < found.vocab_size or depths < 2:
        raise BadParameter(
            f"{where} has mask_token_id={mask} and speculative_tokens={depths}, which is not possible with a "
            f"vocabulary of {found.vocab_size}; the file is broken"
        )
    return replace(found, kind=PEAGLE, mask_token=mask, depths=depths)


def _qwen3(decoder: Mapping[str, Any]) -> dict[str, Any]:
    """What is read of a Qwen3 configuration, whose layers are Llama's but for norms of queries and keys."""
    return {**QWEN3, **{name: decoder[name] for name in READ if decoder.get(name) is not None}}


def _mtp(config: Mapping[str, Any], decoder: Mapping[str, Any]) -> HeadConfig:
    """One module, whose embedding and output layer are the target's."""
    if (count := config.get("num_nextn_predict_layers", 1)) != 1:
        raise Refused(f"the head has {count} MTP modules, and heads of speculators with one are supported")
    size, vocabulary = int(decoder["hidden_size"]), int(decoder["vocab_size"])
    return HeadConfig(MTP, size, size, vocabulary, vocabulary, decoder=dict(decoder), target=_verifier(config))


def _verifier(config: Mapping[str, Any]) -> str:
    found = config.get("speculators_config") or {}
    return str((found.get("verifier") or {}).get("name_or_path") or "")
