"""The files of a trained head. Weights are read from safetensors; `convert` turns pickles into them.

Tensor names of all published formats become those of `modules`:

    EAGLE          midlayer.* -> layers.0.*
    MTP            mtp_layers.0.* -> layers.0.mtp_block.*, but for the four of `OF_MTP`
    Medusa         {k}.{j}.linear.* -> blocks.{k}.layers.{j}.*     {k}.{last}.weight -> lm_heads.{k}.weight
    Hydra          hydra_mlp.{k}.{j}.{linear, res_connection}.* -> blocks.{k}.{i}.{linear, residual}.*, the i-th j
                   hydra_lm_head.{k}.* -> lm_heads.{k}.*           prefix_embeding_layer.* -> prefix.*
                   input_embed_fn.weight -> embed_tokens.weight
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leapahead.core.errors import BadParameter, Refused, trained_in
from leapahead.core.storage import replacing
from leapahead.drafters.heads import formats
from leapahead.drafters.heads.config import HeadConfig

if TYPE_CHECKING:
    from torch import Tensor

PICKLES = (".bin", ".pt", ".pth", ".ckpt")
NO_WEIGHTS = ("training_args.", "optimizer.", "scheduler.", "scaler.", "rng_state")  # of a training, beside weights
MEDUSA_LAYER = re.compile(r"(?:medusa_heads?\.)?(\d+)\.(\d+)\.linear\.(weight|bias)")
MEDUSA_OUTPUT = re.compile(r"(?:medusa_heads?\.)?(\d+)\.\d+\.weight")
HYDRA_LAYER = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.(linear|res_connection)\.(weight|bias)")
HYDRA_OUTPUT = re.compile(r"hydra_lm_head\.(\d+)\.(?:1\.)?(weight|bias)")
HYDRA_NAMED = re.compile(r"blocks\.(\d+)\.(\d+)\.((?:linear|residual)\.(?:weight|bias))")
MTP_LAYER = re.compile(r"mtp_layers\.(\d+)\.(\w+)\.(.*)")
OF_MTP = {
    "token_layernorm": "enorm",
    "hidden_layernorm": "hnorm",
    "input_proj": "eh_proj",
    "final_layernorm": "post_norm",
}
# Of training only, derived, or not read: DSpark's confidence, which is measured here, and an embedding of Hydra++.
UNUSED = ("verifier_", "t2d", "confidence_head.", "prefix.embed_tokens.")
DERIVED = "rotary_emb."
RENAMED = {"midlayer.": "layers.0.", "prefix_embeding_layer.": "prefix.", "input_embed_fn.": "embed_tokens."}


def canonical(name: str) -> str:
    """The name that a tensor has in `modules`."""
    name = name.removeprefix("model.").removeprefix("module.").removeprefix("medusa_heads.")
    if found := MEDUSA_LAYER.fullmatch(name):
        head, layer, which = found.groups()
        return f"blocks.{head}.layers.{layer}.{which}"
    if found := MEDUSA_OUTPUT.fullmatch(name):
        return f"lm_heads.{found.group(1)}.weight"
    if found := HYDRA_LAYER.fullmatch(name):
        head, layer, part, which = found.groups()
        return f"blocks.{head}.{layer}.{'linear' if part == 'linear' else 'residual'}.{which}"
    if found := HYDRA_OUTPUT.fullmatch(name):
        return f"lm_heads.{found.group(1)}.{found.group(2)}"
    if found := MTP_LAYER.fullmatch(name):
        layer, part, rest = found.groups()
        return f"layers.{layer}.{OF_MTP.get(part, f'mtp_block.{part}')}.{rest}"
    for published, own in RENAMED.items():
        name = name.replace(published, own)
    return name


def _numbered(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with the layers of Hydra's blocks numbered from 0 on: dropout, which has no weights, counts too."""
    places: dict[str, set[int]] = {}
    for name in tensors:
        if found := HYDRA_NAMED.fullmatch(name):
            places.setdefault(found.group(1), set()).add(int(found.group(2)))

    def renamed(found: re.Match[str]) -> str:
        head, layer, rest = found.groups()
        return f"blocks.{head}.{sorted(places[head]).index(int(layer))}.{rest}"

    return {HYDRA_NAMED.sub(renamed, name): tensor for name, tensor in tensors.items()}


def read_config(folder: Path) -> dict[str, Any]:
    """The content of a head's `config.json`.

    Raises:
        BadParameter: there is none, or it cannot be read.
    """
    path = folder / "config.json"
    if not folder.is_dir():
        raise BadParameter(f"there is no head at {folder}: a head is a folder with config.json and model.safetensors")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise BadParameter(f"{folder} is no head: it has no config.json{trained_in(folder)}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise BadParameter(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise BadParameter(f"{path} is no configuration: expected an object, not {type(found).__name__}")
    return found


def read(folder: Path) -> tuple[HeadConfig, dict[str, Tensor]]:
    """A head's configuration and its tensors, by the names of `modules`, on the CPU.

    Raises:
        BadParameter: no head is there, or a file is broken.
        Refused: the weights are a pickle, or a kind of head that is not supported.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    found = read_config(folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        if pickles := _weights(folder.iterdir()):
            raise Refused(
                f"{folder} has its weights in the pickle {pickles[0].name}, which is not loaded since it may run code; "
                f"convert it once with `leapahead convert-head {folder} NEW_FOLDER`"
            )
        raise BadParameter(f"{folder} has no weights: expected model.safetensors")
    tensors: dict[str, Tensor] = {}
    for path in files:
        try:
            tensors |= load_file(path)
        except (OSError, SafetensorError) as error:
            raise BadParameter(f"{path} is not a readable safetensors file: {error}") from error
    return parsed(found, tensors, str(folder))


def parsed(found: Mapping[str, Any], tensors: Mapping[str, Tensor], where: str) -> tuple[HeadConfig, dict[str, Tensor]]:
    """The configuration that these files describe, and the tensors by the names of `modules`.

    Raises:
        LeapaheadError: see `formats.parse`.
    """
    named = _numbered({canonical(name): tensor for name, tensor in tensors.items()})
    named = {name: each for name, each in named.items() if not name.startswith(UNUSED) and DERIVED not in name}
    if "mask_hidden" in named:  # P-EAGLE's, a vector
        named["mask_hidden"] = named["mask_hidden"].reshape(1, 1, -1)
    return formats.parse(found, {name: tuple(tensor.shape) for name, tensor in named.items()}, where), named


def write(folder: Path, found: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Writes a head: `config.json`, and the tensors as `model.safetensors`.

    Raises:
        BadParameter: the folder cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    made = not os.path.exists(folder)  # false for a name that is too long, of which Path complains
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / "config.json") as config, replacing(folder / "model.safetensors") as weights:
            config.write_text(json.dumps(dict(found), indent=2) + "\n", encoding="utf-8")
            save_file({name: each.contiguous() for name, each in tensors.items()}, weights)
            weights.chmod(config.stat().st_mode)  # safetensors lets nobody else read what it writes
    except (OSError, SafetensorError) as error:
        raise BadParameter(f"the head cannot be written to {folder}: {error}") from error
    finally:
        if made:
            with suppress(OSError):  # it is not empty, unless nothing was written
                folder.rmdir()


def convert(source: Path, destination: Path) -> HeadConfig:
    """Turns the pickled weights of a head into safetensors, by the names of `modules`.

    Nothing in the pickle is executed (`torch.load(weights_only=True)`).

    Raises:
        LeapaheadError: no head is there, the pickle holds more than tensors, or the destination is not empty.
    """
    import torch

    found = read_config(source)
    if destination.exists() and any(destination.iterdir()):
        raise BadParameter(f"{destination} is not empty; give a new folder")
    tensors: dict[str, Tensor] = {}
    for path in _weights(source.iterdir()):
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # whatever a broken or malicious pickle raises
            raise BadParameter(
                f"{path} cannot be converted: it is broken or holds more than tensors ({type(error).__name__})"
            ) from error
        if not isinstance(loaded, dict) or not all(isinstance(name, str) for name in loaded):
            raise BadParameter(
                f"{path} cannot be converted: it holds no tensors by their names, as the state_dict of a module does"
            )
        # Copies: Hydra's layers share their weights, and safetensors does not write shared ones.
        tensors |= {name: value.clone() for name, value in loaded.items() if isinstance(value, torch.Tensor)}
    if not tensors:
        endings = ", ".join(f"*{suffix}" for suffix in PICKLES)
        raise BadParameter(f"{source} has no pickled weights, which are tensors by their names in files {endings}")
    described, named = parsed(found, tensors, str(source))
    write(destination, found, named)
    return described


def _weights(paths: Iterable[Path]) -> list[Path]:
    """The pickles that may hold weights."""
    return sorted(
        path for path in paths if path.suffix in PICKLES and not path.name.startswith(NO_WEIGHTS) and path.is_file()
    )
