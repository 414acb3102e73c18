"""The program of a process that was started for a device: it loads the model there and follows the first process."""

from __future__ import annotations

import json
import sys
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from leapahead.models.base import Target
from leapahead.models.loading import load
from leapahead.models.parallel.launch import HOST, follow_first, linked


def main() -> None:
    """The program of a process that was started for a device."""
    given = json.loads(sys.argv[1])
    store = TCPStore(HOST, given["port"], given["size"], is_master=False, wait_for_workers=False)
    link = linked(store, given["rank"], given["size"], is_local=True)

    def loaded(device: str) -> tuple[Target, Any]:
        found = load(device=device, **given["options"])
        return found.target, found.tokenizer

    follow_first(loaded, given["device"], link)
