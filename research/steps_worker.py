"""Whole steps on the toy target for `research.steps_against`: `python steps_worker.py BATCH TEMPERATURE CONTEXT`.

    a line with a number of steps  ->  [microseconds a sequence of each step], the forward and the choosing apart
    the same behind "texts"        ->  a digest of the drafts of these steps, their estimates, and the texts

It is run as a file, by the code of the checkout that is first in PYTHONPATH, which may be an older one.
"""

import gc
import hashlib
import json
import sys
from typing import Any

import numpy as np

from research.drafting import Usual, started
from research.toy_overhead import NODES, WARM_UP, _step

digest = hashlib.sha256()


class Watched(Usual):
    """The usual sources. What they draft is part of the digest while it is `watched`."""

    watched = False

    def propose(self, *args: Any) -> list[Any]:
        found = super().propose(*args)
        for each in found if self.watched else ():
            tree, expected = each.tree, each.expected
            digest.update(repr((tree.token_list, tree.parent_list, each.sources)).encode())
            digest.update(b"" if expected is None else np.asarray(expected).tobytes())
        return found


def main(batch: str, temperature: str, context: str) -> None:
    """Answers the lines of its input."""
    engine, drafter, handles = started(
        "compiled", int(batch), float(temperature), int(context), lambda table: Watched(table, NODES)
    )
    gc.collect()
    gc.disable()  # a collection in between would be charged to one step
    for _ in range(WARM_UP):
        engine.step()
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        *texts, steps = line.split()
        drafter.watched = bool(texts)
        times = [_step(engine, handles)["outside"] for _ in range(int(steps))]
        digest.update(repr([handle.tokens for handle in handles]).encode() if texts else b"")
        print(json.dumps(digest.hexdigest() if texts else times), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
