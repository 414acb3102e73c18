"""`python -m research hybrid-gguf`: a stand-in in the shapes of a hybrid as a GGUF file for llama.cpp.

`leapahead export-gguf` writes Llamas only. This writes what `research.hybrid` makes, as llama.cpp's granitehybrid:

    in the folder                  in the file
    self_attn.q_proj, k_proj       rows reordered, see `leapahead.integrations.gguf`
    shared_mlp.input_linear        ffn_gate and ffn_up
    mamba.A_log                    ssm_a, which is -exp(A_log)
    number of key-value heads      one for each layer, 0 for recurrent ones
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import gguf
import llama_cpp
import torch
from safetensors import safe_open
from torch import Tensor

from leapahead.cli import screen
from leapahead.cli.command import Command
from leapahead.core.errors import Refused
from leapahead.integrations.gguf import KINDS, MIXTURES, Progress, _check_arguments, _quantise
from leapahead.integrations.gguf_shape import _rope
from leapahead.integrations.gguf_vocabulary import Vocabulary, read_json

FILE_TYPES = {"F32": gguf.LlamaFileType.ALL_F32, "BF16": gguf.LlamaFileType.MOSTLY_BF16}
ENDS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
LAYER = {  # parts that are copied as they are
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "shared_mlp.output_linear.weight": "ffn_down.weight",
    "mamba.in_proj.weight": "ssm_in.weight",
    "mamba.conv1d.bias": "ssm_conv1d.bias",
    "mamba.dt_bias": "ssm_dt.bias",
    "mamba.out_proj.weight": "ssm_out.weight",
}
SMALL = ("ssm_conv1d", "ssm_a", "ssm_d", "ssm_norm")  # F32 whatever the file's type is


def export(folder: Path, out: Path, kind: str, progress: Progress) -> None:
    """Writes the stand-in of `folder` to `out`.

    Raises:
        BadParameter: an unknown kind, no model in `folder`, or `out` exists.
        Refused: the model is no dense hybrid with one group and rotary positions that are not scaled.
    """
    _check_arguments(folder, out, kind, force=False)
    config = read_json(folder / "config.json", required=True)
    need = {"model_type": "granitemoehybrid", "num_local_experts": 0, "position_embedding_type": "rope"}
    if any(config.get(key) != value for key, value in need.items()) or config.get("mamba_n_groups") != 1:
        raise Refused(f"{folder} holds no stand-in in the shapes of a hybrid; use `leapahead export-gguf` for a Llama")
    if _rope(folder, config)["rope_type"] != "default":
        raise Refused(f"{folder} has scaled rotary positions, which this export cannot express")
    vocabulary = Vocabulary.read(folder, config["vocab_size"])
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as work:
        file = Path(work) / "plain.gguf"
        count = _write(file, folder, config, vocabulary, "F32" if kind == "f32" else "BF16", progress)
        if kind in MIXTURES:
            plain, file = file, Path(work) / "quantised.gguf"
            _quantise(llama_cpp, plain, file, kind, count, progress)
        os.replace(file, out)


def _write(
    file: Path, folder: Path, config: dict[str, Any], vocabulary: Vocabulary, dtype: str, progress: Progress
) -> int:
    """Writes an unquantised file; returns its number of tensors."""
    writer = gguf.GGUFWriter(file, "granitehybrid")
    _add_metadata(writer, config, _rope(folder, config)["rope_theta"], dtype)
    vocabulary.write(writer)
    tensors = dict(_tensors(folder, config))
    for done, (name, tensor) in enumerate(tensors.items(), start=1):
        matrix = dtype == "BF16" and tensor.dim() > 1 and not any(part in name for part in SMALL)
        values = tensor.to(torch.bfloat16).view(torch.uint8) if matrix else tensor.float()
        raw = gguf.GGMLQuantizationType.BF16 if matrix else None
        writer.add_tensor(name, values.contiguous().numpy(), raw_dtype=raw)
        progress("converting", done, len(tensors))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return len(tensors)


def _add_metadata(writer: Any, config: dict[str, Any], theta: float, dtype: str) -> None:
    heads = [config["num_key_value_heads"] if kind == "attention" else 0 for kind in config["layer_types"]]
    writer.add_type("model")
    writer.add_file_type(FILE_TYPES[dtype])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["shared_intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(heads)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(theta)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_inner_size(config["mamba_expand"] * config["hidden_size"])
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_time_step_rank(config["mamba_n_heads"])
    writer.add_ssm_group_count(1)


def _tensors(folder: Path, config: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Names and values in the file."""
    for shard in sorted(folder.glob("*.safetensors")):
        with safe_open(shard, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (it is not a mapping)
                yield from _converted(name, tensors.get_tensor(name), config)


def _converted(name: str, tensor: Tensor, config: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    if name.removesuffix(".weight") in ENDS:
        yield f"{ENDS[name.removesuffix('.weight')]}.weight", tensor
        return
    _, _, layer, part = name.split(".", 3)
    at = f"blk.{layer}."
    if part in LAYER:
        yield at + LAYER[part], tensor
    elif part in ("self_attn.q_proj.weight", "self_attn.k_proj.weight"):
        heads = config["num_attention_heads" if "q_proj" in part else "num_key_value_heads"]
        pairs = tensor.view(heads, 2, tensor.shape[0] // heads // 2, -1).transpose(1, 2)
        yield f"{at}attn_{part[10]}.weight", pairs.reshape(tensor.shape)
    elif part == "shared_mlp.input_linear.weight":
        gate, up = tensor.chunk(2)
        yield f"{at}ffn_gate.weight", gate
        yield f"{at}ffn_up.weight", up
    elif part == "mamba.conv1d.weight":
        yield f"{at}ssm_conv1d.weight", tensor.squeeze(1)
    elif part == "mamba.A_log":
        yield f"{at}ssm_a", -tensor.float().exp()[:, None]
    elif part == "mamba.D":
        yield f"{at}ssm_d", tensor[:, None]
    elif part == "mamba.norm.weight":
        yield f"{at}ssm_norm.weight", tensor[None]
    else:
        raise Refused(f"a stand-in in the shapes of a hybrid has no tensor {name}")


@click.command(cls=Command)
@click.argument("folder", type=click.Path(path_type=Path), metavar="DIR")
@click.argument("out", type=click.Path(path_type=Path), metavar="FILE")
@click.option("--type", "kind", default="bf16", show_default=True, help=f"{', '.join(KINDS)}.")
def main(folder: Path, out: Path, kind: str) -> None:
    """Write the hybrid stand-in in DIR as a GGUF file for llama.cpp."""
    with screen.progress("reading") as progress:
        export(folder, out, kind, progress)
    click.echo(f"{out}: {kind}; {out.stat().st_size / 1e9:.2f} GB")
