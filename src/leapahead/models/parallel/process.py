"""The program of a process that was started for a device: it loads the model there and follows the first process."""

from __future__ import annotations

import json
import sys
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from leapahead.core import openmp
from leapahead.models.base import Target
from leapahead.models.parallel.launch import HOST, follow_first, linked
from leapahead.models.transformers import pretrained


def main() -> None:
    """The program of a process that was started for a device."""
    given = json.loads(sys.argv[1])
    store = TCPStore(HOST, given["port"], given["size"], is_master=False, wait_for_workers=False)
    link = linked(store, given["rank"], given["size"], is_local=True)

    @openmp.watched()
    def load(device: str) -> tuple[Target, Any]:
        return pretrained.load(device=device, with_tokenizer=False, **given["options"])

    follow_first(load, given["device"], link)
