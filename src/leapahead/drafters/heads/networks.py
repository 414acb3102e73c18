"""The network of each kind of head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from leapahead.drafters.heads.config import (
    DFLASH,
    DFLASH2,
    DSPARK,
    EAGLE,
    EAGLE3,
    HYDRA,
    HYDRA_PREFIX,
    MEDUSA,
    MTP,
    PEAGLE,
    HeadConfig,
)
from leapahead.drafters.heads.dflash import DFlash
from leapahead.drafters.heads.dflash2 import DFlash2
from leapahead.drafters.heads.hydra import Hydra
from leapahead.drafters.heads.modules import Eagle, Eagle3, Medusa, ParallelEagle
from leapahead.drafters.heads.mtp import of_config

NETWORKS: dict[str, Callable[[Any], nn.Module]] = {  # kind -> of its configuration
    MEDUSA: Medusa,
    EAGLE: Eagle,
    EAGLE3: Eagle3,
    PEAGLE: ParallelEagle,
    HYDRA: Hydra,
    HYDRA_PREFIX: Hydra,
    DFLASH: DFlash,
    DFLASH2: DFlash2,
    DSPARK: DFlash,
    MTP: of_config,
}


def make(config: HeadConfig) -> nn.Module:
    """The network of a configuration, with weights that are not trained."""
    return NETWORKS[config.kind](config)
