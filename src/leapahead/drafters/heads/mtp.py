"""MTP modules (DeepSeek-V3, 2412.19437, section 2.2): module k predicts the token k + 1 places after the next one.

    module k, row of a token:   (the token, module k - 1's output of the token before it)     predicts token + 1
    module 0, row of a token:   (the token, the target's last hidden state before it)

With a(k, j) for module k's output of the row of token j, equations 21 to 23 are

    a(k, j) = block_k(W_k [norm(emb(token j)), norm(a(k - 1, j - 1))])      a(-1, j): the target's state of position j

and the block attends to the rows of its own module. So a drafted node at depth d has rows in the modules from d on, and
the candidates after it are read from module d. Below the last module, that one continues its own outputs, as vLLM does
for checkpoints with a single module.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel
from transformers.modeling_layers import MtpLayer, MtpModel

from leapahead.core.errors import Refused
from leapahead.drafters.heads.cache import KEYS, VALUES
from leapahead.drafters.heads.config import MTP, HeadConfig
from leapahead.drafters.heads.head import Path
from leapahead.drafters.heads.row_head import Part, RowHead
from leapahead.models.base import TargetInfo
from leapahead.models.transformers.linears import is_packed, pack

STATES = 2  # a plane beside KEYS and VALUES: outputs of the rows, float [1, rows, hidden_size]
# Of models whose modules `MtpModel` can load, though their configurations do not say so to Transformers 5.23: the field
# that counts them, 1 where it is missing.
UNTOLD = {"qwen3_next": "num_nextn_predict_layers"}
UNTOLD |= dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), "mtp_num_hidden_layers")
FULL, SLIDING = "full_attention", "sliding_attention"


class Mtp(nn.Module):
    """The modules, with the target's embedding and output layer.

    Args:
        config: of the decoder layers.
        layers: one `MtpLayer` of Transformers for each module.
        embed_tokens, lm_head, rotary: the target's; `rotary` is None for layers without.

    Raises:
        Refused: a layer does not attend to rows, or to all of them in another way than by a sliding window.
    """

    has_attention = True
    d2t = None

    def __init__(self, config: Any, layers: nn.ModuleList, embed_tokens: Any, lm_head: Any, rotary: Any) -> None:
        super().__init__()
        self.layers, self.embed_tokens, self.lm_head, self.rotary = layers, embed_tokens, lm_head, rotary
        self._types = list(getattr(config, "layer_types", None) or [FULL] * len(layers))
        if unknown := sorted(set(self._types) - {FULL, SLIDING}):
            raise Refused(
                f"MTP modules with layers of type {unknown[0]!r} are not supported: they cannot follow a tree"
            )
        varied = getattr(config, "is_heterogeneous", False)
        each = config.per_layer_config if varied else [config] * len(layers)
        self.windows = [
            getattr(own, "sliding_window", None) if kind == SLIDING else None
            for own, kind in zip(each, self._types, strict=True)
        ]
        self._rope_by_type = rotary is not None and bool(config.nested_rope_parameter_keys(config.rope_parameters))

    def fuse(self, states: Tensor) -> Tensor:
        """The target's last hidden states as they are."""
        return states

    def row(self, layer: int, tokens: Tensor, states: Tensor, positions: Tensor, mask: Tensor, cells: Any) -> Tensor:
        """The outputs of one module for some rows.

        Args:
            tokens, positions: int64 [1, rows].
            states: float [1, rows, hidden_size], of the module before.
            mask: float [1, 1, rows, rows in the cache], added to the scores.
            cells: takes keys and values, and gives those of all rows, see `_Cells`.

        Returns:
            float [rows, hidden_size].
        """
        embedded = self.embed_tokens(tokens)
        kind = {"layer_type": self._types[layer]} if self._rope_by_type else {}
        angles = None if self.rotary is None else self.rotary(embedded, position_ids=positions, **kind)
        found: Tensor = self.layers[layer](embedded, states, angles, mask, positions, cells)
        return found[0]

    def logits(self, states: Tensor) -> Tensor:
        """float [rows, vocabulary]."""
        found: Tensor = self.lm_head(states)
        return found


class _Cells:
    """What the attention of a decoder layer takes for a cache of Transformers: the rows of all texts of a forward."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Keeps new rows; returns all of every text, one text after another, [1, heads, all rows, dim]."""
        sizes = [len(part.tokens) for part in self._parts]
        found = []
        for which, rows in ((KEYS, keys), (VALUES, values)):
            own = zip(self._parts, torch.split(rows[0], sizes, dim=1), strict=True)
            every = [part.text.write((layer, which), part.begin, some) for part, some in own]
            found.append((torch.cat(every, dim=1) if len(every) > 1 else every[0])[None])
        return found[0], found[1]


class MtpHead(RowHead):
    """See the module. A row's outputs are float [modules, hidden_size]; where a module lacks it, they are not read."""

    module: Mtp  # type: ignore[assignment]

    def read_out(self, states: Tensor, paths: Sequence[Path]) -> Tensor:
        last = len(self.module.layers) - 1
        rows = [state[min(len(path), last)] for state, path in zip(states, paths, strict=True)]
        return self.module.logits(torch.stack(rows))

    def _computed(self, parts: Sequence[Part]) -> list[Tensor]:
        count, sizes = len(self.module.layers), [len(part.tokens) for part in parts]
        tokens = torch.tensor([[token for part in parts for token in part.tokens]], device=self.device)
        positions = torch.tensor([[at + 1 for part in parts for at in part.positions]], device=self.device)
        found = [part.states.new_zeros(len(part.tokens), count, part.states.shape[-1]) for part in parts]
        before: list[Tensor] = [part.states for part in parts]  # of texts, what the rows of the next module read
        for layer in range(count):
            if all(_depth(part) > layer for part in parts) and layer < count - 1:
                continue  # these nodes have no rows in it
            read = [
                _of_nodes(part, layer, count) if _depth(part) else states
                for part, states in zip(parts, before, strict=True)
            ]
            mask = self._mask(parts, layer)
            out = self.module.row(layer, tokens, torch.cat(read)[None], positions, mask, _Cells(parts))
            for index, (part, own) in enumerate(zip(parts, torch.split(out, sizes), strict=True)):
                found[index][:, layer] = own
                if not _depth(part) and layer < count - 1:
                    kept = part.text.write((layer, STATES), part.begin, own[None])[0]
                    first = kept[part.begin - 1] if part.begin else torch.zeros_like(own[0])
                    before[index] = torch.cat((first[None], own[:-1]))
        return found

    def _mask(self, parts: Sequence[Part], layer: int) -> Tensor:
        """float [1, 1, rows, rows in the cache]: the rows of each text that each row attends to, and nothing else.

        Module k has no output for the first k rows of a text, which nothing attends to but they themselves.
        """
        blocks, window = [], self.module.windows[layer]
        for part in parts:
            rows = torch.arange(len(part.tokens), device=self.device)
            shape = len(rows), part.begin + len(rows)
            visible = (
                torch.ones(shape, dtype=torch.bool, device=self.device) if part.mask is None else part.mask.clone()
            )
            if window is not None:
                places = [*range(part.text.length), *(part.text.length - 1 + len(path) for path in part.text.nodes)]
                columns = torch.tensor(places[: shape[1]], device=self.device)
                own = torch.tensor(part.positions, device=self.device)
                visible &= own[:, None] - columns < window
            visible[:, :layer] = False
            visible[rows, part.begin + rows] = True
            blocks.append(visible)
        mask: Tensor = torch.block_diag(*blocks) if len(blocks) > 1 else blocks[0]  # type: ignore[no-untyped-call]
        return torch.zeros(mask.shape, dtype=self.dtype, device=self.device).masked_fill_(
            ~mask, torch.finfo(self.dtype).min
        )[None, None]


def _depth(part: Part) -> int:
    """The least depth of a part's nodes; 0 for rows of committed tokens."""
    return min((len(path) for path in part.paths), default=0)


def _of_nodes(part: Part, layer: int, count: int) -> Tensor:
    """What nodes read in a module: their parents' outputs of the module before, or of the last one below it."""
    which = [layer - 1 if len(path) <= layer else count - 1 for path in part.paths]
    return part.states[range(len(which)), which]


# ------------------------------------------------------------------------------------------------------- loading


def of_config(config: HeadConfig) -> Mtp:
    """The network of a head in the format of speculators, with weights that are not read.

    Raises:
        Refused: decoder layers of a kind that Transformers does not have.
    """
    assert config.decoder is not None
    fields = {name: value for name, value in config.decoder.items() if name not in ("architectures", "layer_types")}
    kind = str(fields.pop("model_type", ""))
    try:
        own = AutoConfig.for_model(kind, **{**fields, "num_hidden_layers": 1})
        if getattr(own, "layer_types", None) is not None:
            own.layer_types = [FULL]
        own._attn_implementation = "sdpa"
        with torch.device("meta"):
            base = AutoModel.from_config(own)
            norm = next(type(each) for name, each in base.layers[-1].named_modules() if "norm" in name)
            layers = nn.ModuleList([MtpLayer(own, type(base.layers[-1]), norm, 0)])
            embedding = nn.Embedding(config.vocab_size, config.hidden_size)
            output = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        with torch.device("cpu"):
            rotary = type(base.rotary_emb)(own)
    except (ValueError, TypeError, AttributeError, StopIteration) as error:
        raise Refused(f"the head has decoder layers of type {kind!r}, which are not supported: {error}") from error
    return Mtp(own, layers, embedding, output, rotary)


def _count(config: Any) -> int:
    """The number of a model's MTP modules, by the configuration of its text model."""
    field = UNTOLD.get(config.model_type)
    untold: int = 0 if field is None else getattr(config, field, 1)
    return getattr(config, "num_mtp_layers", None) or untold


@contextmanager
def _told(config: Any) -> Iterator[None]:
    """Inside, a configuration says how many modules there are, where the version of Transformers leaves that out."""
    if getattr(config, "num_mtp_layers", None) is not None:
        yield
        return
    count = _count(config)
    config.num_mtp_layers, config.mtp_layer_types = count, [FULL] * count
    try:
        yield
    finally:
        del config.num_mtp_layers, config.mtp_layer_types


def own(target: Any) -> MtpHead:
    """The MTP modules of a target's own checkpoint, for `head="mtp"`.

    Raises:
        Refused: the target is no model of Transformers, or has none that Transformers loads.
    """
    info: TargetInfo = target.info
    model = getattr(target, "model", None)
    if not isinstance(model, nn.Module):
        raise Refused(
            f"head='mtp' takes the MTP modules of a model of Transformers, which {info.name} is not; load its "
            "Transformers folder, or use another head"
        )
    settings: Any = model.config
    text: Any = settings.get_text_config(decoder=True)
    if not _count(text):
        raise Refused(
            f"{info.name} has no MTP modules that Transformers loads: its configuration ({text.model_type}) has no "
            "num_mtp_layers; use head=FOLDER with a head that was trained for it"
        )
    if hasattr(target, "whole_weight"):
        raise Refused(
            f"the MTP modules of {info.name} use its own layers, whose weights are divided among processes; use a head "
            "with a checkpoint of its own, or leave out tensor_parallel"
        )
    if not settings.name_or_path:
        raise Refused(
            f"the MTP modules of {info.name} cannot be found, since it was not loaded from a checkpoint; load it from "
            "its folder, or by its name"
        )
    try:
        with _told(text):
            loaded = MtpModel.from_pretrained(model, device_map={"": torch.device(target.device)})
    except (RuntimeError, ValueError, OSError, KeyError) as error:
        raise Refused(
            f"the MTP modules of {info.name} cannot be loaded, so use another head or none: {shorten(str(error), 160)}"
        ) from error
    if loaded.config._attn_implementation not in ("sdpa", "eager"):  # others take no mask
        loaded.config._attn_implementation = "sdpa"
    # The modules alone are changed: the embedding and the output layer are the model's.
    loaded.layers.to(loaded.shared_head.weight.dtype).requires_grad_(False).eval()
    if is_packed(model):
        pack(loaded.layers)
    module = Mtp(loaded.config, loaded.layers, loaded.embed_tokens, loaded.shared_head, loaded.rotary_emb)
    config = HeadConfig(MTP, text.hidden_size, text.hidden_size, info.vocab_size, info.vocab_size, decoder={})
    return MtpHead(config, module, info, f"mtp of {info.name}")
