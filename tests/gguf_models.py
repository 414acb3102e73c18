"""GGUF files for tests: random Llamas with the bundled tokenizer, exported by `export_gguf`."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import leapahead

SOURCE = Path(leapahead.__file__).parent / "assets" / "tiny"  # also while a test has another bundled model


@cache
def folder() -> Path:
    """A folder of this process, removed when it ends."""
    path = Path(tempfile.mkdtemp(prefix="leapahead-gguf-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


@cache
def llama(kind: str = "f32", seed: int = 0, **config: Any) -> Path:
    """A Llama of two layers, with attention so sharp that one wrong entry in its cache changes the text."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from leapahead.integrations.gguf import export_gguf

    source = folder() / f"llama-{seed}-{abs(hash(tuple(sorted(config.items()))))}"
    if not source.is_dir():
        values: dict[str, Any] = {
            "vocab_size": 4096,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "tie_word_embeddings": True,
            "initializer_range": 0.4,
            **config,
        }
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            LlamaForCausalLM(LlamaConfig(**values)).save_pretrained(source)
        for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
            shutil.copy(SOURCE / name, source / name)
    return export_gguf(source, folder() / f"{source.name}-{kind}.gguf", kind, force=True).path


@cache
def bundled(kind: str) -> Path:
    """The bundled model as a GGUF file of type `kind`."""
    from leapahead.integrations.gguf import export_gguf

    return export_gguf(str(SOURCE), folder() / f"bundled-{kind}.gguf", kind, force=True).path


def rewritten(
    source: Path, out: Path, values: dict[str, Any], tensors: dict[str, Any] | None = None, half: bool = False
) -> Path:
    """Copies a file with other metadata and with further tensors; a value of None removes an entry.

    Args:
        half: write the matrices of a float32 file in float16.
    """
    import numpy as np
    from gguf import GGUFReader, GGUFValueType, GGUFWriter

    reader = GGUFReader(source)
    kinds = {bool: GGUFValueType.BOOL, int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32}
    writer = GGUFWriter(out, values.get("general.architecture", "llama"))
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in values and name != "general.architecture":
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=field.types[-1])
    for name, value in values.items():
        if isinstance(value, list):
            writer.add_array(name, value)
        elif value is not None and name != "general.architecture":
            writer.add_key_value(name, value, kinds.get(type(value), GGUFValueType.STRING))
    for tensor in reader.tensors:
        data = np.array(tensor.data)
        if half and data.ndim > 1:
            writer.add_tensor(tensor.name, data.astype(np.float16))
        else:
            writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
    for name, data in (tensors or {}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out
