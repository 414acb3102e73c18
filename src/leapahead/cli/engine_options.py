"""Options of the engines: how Transformers and OpenVINO run a model, and llama.cpp a GGUF file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from leapahead.cli.command import option

Option = Callable[[Any], Any]  # a click decorator

MODEL_GROUP, GGUF_GROUP, OPENVINO_GROUP = "Model options", "GGUF options (llama.cpp)", "OpenVINO options"

SEVERAL_DEVICES: tuple[Option, ...] = (
    option(
        "--devices",
        metavar="DEVICE,...",
        group=MODEL_GROUP,
        help="Divide the branches of drafts over devices, each with the whole model: cuda:0,cuda:1, or torchrun for "
        "the processes that torchrun started. Transformers only.",
    ),
    option(
        "--tensor-parallel",
        is_flag=True,
        default=None,
        group=MODEL_GROUP,
        help="Divide the weights over --devices instead, where the model fits on none of them.",
    ),
)
OF_TRANSFORMERS: tuple[Option, ...] = (
    option(
        "--static",
        type=click.Choice(["auto", "off", "graphs", "compiled"]),
        group=MODEL_GROUP,
        show_default="auto",
        help="Capture a Transformers model's forwards as CUDA graphs, and compile those in use; auto: graphs on CUDA.",
    ),
    option(
        "--pack/--no-pack",
        default=None,
        group=MODEL_GROUP,
        show_default="--pack",
        help="Lay out a Transformers model's bfloat16 weights for faster products on a CPU.",
    ),
)
ENGINE: tuple[Option, ...] = (
    option(
        "--threads-batch",
        "n_threads_batch",
        type=int,
        metavar="N",
        group=GGUF_GROUP,
        show_default="as --threads",
        help="CPU threads for forwards of many tokens.",
    ),
    option(
        "-ngl",
        "--gpu-layers",
        "n_gpu_layers",
        type=int,
        metavar="N",
        group=GGUF_GROUP,
        show_default="llama.cpp's",
        help="Number of layers on the GPU; -1 is all.",
    ),
    option(
        "--no-mmap",
        "use_mmap",
        flag_value=False,
        default=None,
        group=GGUF_GROUP,
        help="Read the file into memory instead of mapping it.",
    ),
    option(
        "--mlock",
        "use_mlock",
        is_flag=True,
        default=None,
        group=GGUF_GROUP,
        help="Lock the model in memory, so that it is never swapped out.",
    ),
    option(
        "--no-repack",
        "use_extra_bufts",
        flag_value=False,
        default=None,
        group=GGUF_GROUP,
        help="Do not rearrange quantised weights for the processor when they are loaded.",
    ),
    option(
        "-fa",
        "--flash-attn",
        type=click.Choice(["on", "off"]),
        group=GGUF_GROUP,
        show_default="llama.cpp's",
        help="Flash attention.",
    ),
    option(
        "-ctk",
        "--cache-type-k",
        "type_k",
        metavar="TYPE",
        group=GGUF_GROUP,
        show_default="f16; f32 if the weights are f32",
        help="Type of the cached keys: f32, f16, bf16 or q8_0.",
    ),
    option(
        "-ctv",
        "--cache-type-v",
        "type_v",
        metavar="TYPE",
        group=GGUF_GROUP,
        show_default="f16; f32 if the weights are f32",
        help="Type of the cached values: f32, f16, bf16 or q8_0.",
    ),
    option(
        "-kvu/-no-kvu",
        "--kv-unified/--no-kv-unified",
        "kv_unified",
        default=None,
        group=GGUF_GROUP,
        show_default="by the number of sequences",
        help="One KV cache for all sequences, or one of --ctx-size tokens for each: without branches in drafts, and "
        "faster where many are decoded together.",
    ),
    option(
        "--kept-tokens",
        type=int,
        metavar="N",
        group=GGUF_GROUP,
        show_default="the size of the cache",
        help="Tokens of earlier texts that are kept in the machine's memory, beside the cache; 0 for none.",
    ),
    option(
        "--weights",
        metavar="TYPE",
        group=OPENVINO_GROUP,
        show_default="bf16",
        help="Type that a folder of Transformers is exported with: f32, bf16, int8 or int4.",
    ),
    option(
        "--precision",
        metavar="TYPE",
        group=OPENVINO_GROUP,
        show_default="f32 if the weights are f32, else OpenVINO's",
        help="Type of the computation: f32, bf16 or f16.",
    ),
    option(
        "--copies",
        type=int,
        metavar="N",
        group=OPENVINO_GROUP,
        show_default="1",
        help="Compile the model N times, so that steps of different sizes stay prepared.",
    ),
    option(
        "--cache-type",
        metavar="TYPE",
        group=OPENVINO_GROUP,
        show_default="as --precision",
        help="Type of the cached keys and values: f32, bf16 or f16.",
    ),
)
