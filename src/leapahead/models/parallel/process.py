"""The program of a process that was started for a device: it loads the model there and follows the first process."""

from __future__ import annotations

import json
import sys
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from leapahead.core import openmp
from leapahead.models.base import Target
from leapahead.models.parallel.launch import HOST, TENSOR_PARALLEL, follow_first, linked
from leapahead.models.transformers import pretrained


def main() -> None:
    """The program of a process that was started for a device."""
    given = json.loads(sys.argv[1])
    options = given["options"]
    is_divided = options.pop(TENSOR_PARALLEL, 1) > 1
    store = TCPStore(HOST, given["port"], given["size"], is_master=False, wait_for_workers=False)
    link = linked(store, given["rank"], given["size"], is_local=True)

    @openmp.watched()
    def load(device: str, **more: Any) -> tuple[Target, Any]:
        return pretrained.load(device=device, with_tokenizer=False, **options, **more)

    follow_first(load, given["device"], link, store if is_divided else None, is_local=True)
