"""Loading of trained heads: `head="folder"`, or several in a list or divided by commas; "bundled" for the bundled one,
and "mtp" for the modules in the target's own checkpoint.

A head is loaded beside its target, whose hidden states it reads, once for all drafters of an engine.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from leapahead.core.errors import BadParameter, Refused, needing
from leapahead.core.parameters import apart, file_path
from leapahead.drafters.heads import checkpoint
from leapahead.drafters.heads.config import PROBES
from leapahead.drafters.sources.head import HeadSource
from leapahead.drafters.sources.probes import ProbeSource
from leapahead.models import loading
from leapahead.models.base import EMBEDDINGS, HIDDEN, Target, require
from leapahead.planner.profile import LatencyProfiles

if TYPE_CHECKING:
    from leapahead.drafters.heads.head import Head


OWN = "mtp"  # the name of the MTP modules in the target's own checkpoint


def parsed(head: Any) -> list[Path | None]:
    """The folders of heads that an option names: one, a list, or several divided by commas. No weights are read yet.

    Returns:
        None for the modules of the target's own checkpoint.

    Raises:
        BadParameter: it names none, or a folder that holds none.
    """
    names = apart(head) if isinstance(head, str) else head if isinstance(head, (list, tuple)) else [head]
    if not all(isinstance(name, (str, Path)) for name in names):
        raise BadParameter(f"head must be the folder of a trained head, or several, not {head!r}")
    found = [str(name).strip() for name in names if str(name).strip()]
    if not found:
        raise BadParameter("head names no trained head; give its folder, or several divided by commas")
    names = [loading.bundled("tiny-eagle3") if name == loading.BUNDLED else name for name in found]
    folders = [None if name == OWN else file_path("head", name) for name in names]
    for folder in filter(None, folders):
        checkpoint.read_config(folder)
    return folders


def lasting(head: Any) -> Any:
    """What an option names, with absolute folders: it means the same heads where the working directory has changed.

    What `parsed` refuses stays as it is, as do the values of other drafters that have an option of this name.
    """
    if isinstance(head, (list, tuple)):
        return [lasting(each) for each in head]
    if isinstance(head, str) and len(names := apart(head)) > 1:
        return [lasting(name) for name in names]
    if not isinstance(head, (str, Path)) or not str(head).strip() or head in (OWN, loading.BUNDLED):
        return head
    folder = Path(os.path.expanduser(str(head).strip()))
    return folder.absolute() if (folder / "config.json").is_file() else head


@dataclass(frozen=True, eq=False)
class TrainedHead:
    """A loaded head as what drafts. See `ForwardModel`."""

    head: Head

    @property
    def latency(self) -> LatencyProfiles:
        return self.head.latency

    @property
    def title(self) -> str:
        return f"the head {self.head.name}"

    @property
    def source_name(self) -> str:
        return self.head.config.kind

    def source(self, name: str) -> HeadSource:
        return HeadSource(self, self.head, name)

    def known(self, tokens: Sequence[int], owner: str) -> int:
        return self.head.known(tokens, owner)

    def prepare(self) -> None:
        self.head.prepare()

    def measure(self) -> None:
        self.head.measure()


@dataclass(frozen=True, eq=False)
class TrainedProbes:
    """Loaded probes as what drafts, by rows of the target's own forwards. See `ProbeModel`.

    Attributes:
        name: for reports.
        source_name: the kind of head.
        tokens: ids of the embeddings that were added to the target, one for each depth.
    """

    name: str
    source_name: str
    tokens: tuple[int, ...]

    def source(self, name: str) -> ProbeSource:
        return ProbeSource(self.tokens, self.name, name)


class TrainedHeads:
    """The heads of one engine. Each folder is loaded once and kept as long as the engine."""

    def __init__(self) -> None:
        self._kept: dict[Path | None, TrainedHead | TrainedProbes] = {}

    def all(
        self, folders: Sequence[Path | None], target: Target | None
    ) -> tuple[list[TrainedHead], list[TrainedProbes]]:
        """Several of them, for one target: those with a network of their own, and those that are probes.

        Raises:
            LeapaheadError: one cannot be loaded, or was made for another target.
        """
        found = [self.get(folder, target) for folder in folders]
        return (
            [head for head in found if isinstance(head, TrainedHead)],
            [head for head in found if isinstance(head, TrainedProbes)],
        )

    def get(self, folder: Path | None, target: Target | None) -> TrainedHead | TrainedProbes:
        """One of them; see `all`."""
        name = folder or OWN
        if target is None:
            raise Refused(f"the head {name} cannot be loaded, since this host has no target; leave the head out")
        if folder not in self._kept:
            self._kept[folder] = _load(folder, target, f"the head {name}")
        return self._kept[folder]


def _load(folder: Path | None, target: Target, what: str) -> TrainedHead | TrainedProbes:
    """Loads a head.

    Args:
        what: it is, for messages.
    """
    with needing("a trained head", "transformers", "torch", "transformers", "safetensors"):
        from leapahead.drafters.heads import load, mtp
    if target.info.decoder is not None:
        raise Refused(f"{what} cannot draft for {target.info.name}, an encoder-decoder model; leave out the head")
    remedy = "leave out the head, or " + (
        "leave out devices"
        if target.info.devices > 1
        else "leave out exact"
        if target.info.exact
        else "load a model of Transformers"
    )
    if folder is None:
        require(target.info, frozenset({HIDDEN}), what, remedy)
        return TrainedHead(mtp.own(target))
    config, tensors = checkpoint.read(folder)
    is_probes = config.kind in PROBES
    require(target.info, frozenset({EMBEDDINGS if is_probes else HIDDEN}), what, remedy)
    if is_probes:
        return TrainedProbes(str(folder), config.kind, load.probes(config, tensors, target, str(folder)))
    return TrainedHead(load.load(config, tensors, target, str(folder)))
