"""The network of each kind of head."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from leapahead.drafters.heads.config import DFLASH, DSPARK, EAGLE, EAGLE3, HYDRA, HYDRA_PREFIX, MEDUSA, MTP, HeadConfig
from leapahead.drafters.heads.dflash import DFlash
from leapahead.drafters.heads.hydra import Hydra
from leapahead.drafters.heads.modules import Eagle, Eagle3, Medusa
from leapahead.drafters.heads.mtp import of_config

NETWORKS: dict[str, Callable[[HeadConfig], nn.Module]] = {
    MEDUSA: Medusa,
    EAGLE: Eagle,
    EAGLE3: Eagle3,
    HYDRA: Hydra,
    HYDRA_PREFIX: Hydra,
    DFLASH: DFlash,
    DSPARK: DFlash,
    MTP: of_config,
}


def make(config: HeadConfig) -> nn.Module:
    """The network of a configuration, with weights that are not trained."""
    return NETWORKS[config.kind](config)
