"""One of two processes that divide the weights of tiny models among them, and compare texts with the whole model's.

    python tests/tensor_families.py RANK PORT FOLDER NAME...

FOLDER is where process 0 writes the models; it prints the names of those whose texts are equal.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from architectures import EVERY
from helpers import PROMPT, Scattered, run
from torch import distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from leapahead.models.parallel import tensor
from leapahead.models.transformers import pretrained


def main(rank: int, port: int, folder: Path, names: list[str]) -> None:
    """Both processes make the same calls, so that their forwards fit together."""
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, 2, is_master=rank == 0, wait_for_workers=False)
    with tensor.connected(store, rank, 2, "cpu", is_local=True):
        for architecture in (each for each in EVERY if each.name in names):
            path = folder / architecture.name
            if rank == 0:
                pretrained.save(architecture.build(), None, path)
            distributed.barrier()
            options = {"dtype": "float32", "device": "cpu", "with_tokenizer": False}
            whole, _ = pretrained.load(path, **options)  # type: ignore[arg-type]
            expected = run(whole).tokens
            target, _ = pretrained.load(path, tensor_parallel=2, **options)  # type: ignore[arg-type]
            drafted = run(target, Scattered([*PROMPT, *expected]))
            if rank == 0 and run(target).tokens == drafted.tokens == expected and drafted.stats.accepted:
                print(architecture.name, flush=True)
            elif rank:
                run(target)
    tensor.end()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
