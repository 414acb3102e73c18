"""`python -m research standin-head`: makes a head of the bundled model one of a stand-in model.

A stand-in's hidden states begin with those of its source (`research.widening`), and its layers are spread. So the head
reads the same numbers and proposes the same tokens: `fc`, or Medusa's residual layers and outputs, get columns of
zeros, and EAGLE an embedding of its own, the source's. What a head costs beside the stand-in: EAGLE's stays that of the
small one, Medusa's grows with the hidden size.
"""

from __future__ import annotations

import json
from pathlib import Path

import click
import torch
from safetensors import safe_open
from torch import Tensor

from leapahead.cli.command import Command
from leapahead.drafters.heads import checkpoint
from leapahead.drafters.heads.config import EAGLE, EAGLE3, MEDUSA, HeadConfig
from leapahead.models import loading
from research.widening import spread

FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command(name="standin-head", cls=Command)
@click.argument("head", type=FOLDER)
@click.argument("standin", type=FOLDER)
@click.argument("out", type=click.Path(path_type=Path))
def main(head: Path, standin: Path, out: Path) -> None:
    """Write the head HEAD of the bundled model as one of the stand-in STANDIN."""
    source = Path(loading.bundled())
    small, large = (json.loads((folder / "config.json").read_text(encoding="utf-8")) for folder in (source, standin))
    described, tensors = checkpoint.read(head)
    config = checkpoint.read_config(head)
    width = int(large["hidden_size"])
    if described.kind == MEDUSA:
        tensors = {
            name: _padded(tensor, width, square="blocks" in name) if name.endswith("weight") else tensor
            for name, tensor in tensors.items()
        }
        config["hidden_size"] = width
    else:
        with safe_open(source / "model.safetensors", framework="pt") as file:
            embedding = file.get_tensor("model.embed_tokens.weight")
        tensors.setdefault("embed_tokens.weight", embedding)
        tensors.setdefault("lm_head.weight", embedding.clone())
        tensors["fc.weight"] = _fused(tensors["fc.weight"], described, width)
        config["target_hidden_size"] = width
        layers = spread(int(small["num_hidden_layers"]), int(large["num_hidden_layers"]))
        if described.kind == EAGLE3:
            own = [layers[layer - 1] + 1 if layer else 0 for layer in described.layers]
            config["eagle_aux_hidden_state_layer_ids"] = own
    checkpoint.write(out, config, tensors)
    click.echo(f"{out}: {described.kind} for {standin}")


def _padded(weight: Tensor, width: int, square: bool) -> Tensor:
    """A matrix that reads, and if it is square writes, the first entries of wider states."""
    wide = torch.zeros(width if square else weight.shape[0], width, dtype=weight.dtype)
    wide[: weight.shape[0], : weight.shape[1]] = weight
    return wide


def _fused(weight: Tensor, described: HeadConfig, width: int) -> Tensor:
    """`fc` for states of the stand-in's width: each of the states that it reads gets columns of zeros."""
    own = described.target_hidden_size
    embedded = described.hidden_size if described.kind == EAGLE else 0  # columns of the embedding, which stay
    states = [torch.nn.functional.pad(each, (0, width - own)) for each in torch.split(weight[:, embedded:], own, dim=1)]
    return torch.cat([weight[:, :embedded], *states], dim=1)
