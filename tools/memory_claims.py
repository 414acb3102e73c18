"""The claims on the memory of lookahead decoding, beside measurements and arithmetic."""

from __future__ import annotations

import json
import math
from pathlib import Path

Row = tuple[str, str, str, str]  # claim, value claimed, measured here, comment

WINDOW, NGRAM, GUESSES = 15, 5, 15  # of the pool's figures: 2402.02057, table 4
SETTING = f"({WINDOW}, {NGRAM}, {GUESSES})"
STEP = (WINDOW + GUESSES) * (NGRAM - 1)  # tokens of a step
CLAIMED_MODEL = 14.3e9  # bytes


def memory(root: Path, used: dict[str, int]) -> list[Row]:
    """The rows on memory.

    Args:
        root: of the checkout.
        used: what the part `memory` of the figures measured.
    """
    tiny = root / "src/leapahead/assets/tiny"
    config = json.loads((tiny / "config.json").read_text(encoding="utf-8"))
    shape = (config["num_hidden_layers"], config["num_key_value_heads"], config["head_dim"], 4)
    weights = shape[-1] * _parameters(tiny / "model.safetensors")
    return [
        (
            "memory of a pool of 10,000 n-grams, and of the window",
            "about 2 MB; 28 bytes",
            f"pool: {used['bytes'] / 1e6:.1f} MB with N = {used['ngram']} and {used['keys']:,} keys; window: "
            f"{WINDOW - 1 + (NGRAM - 2) * WINDOW} token ids at {SETTING} (arithmetic)",
            "What Python allocates; about right for the pool. 28 bytes are seven ids, not N-1 rows of W.",
        ),
        (
            "all memory that lookahead adds",
            f"less than 0.1 % of a model of {CLAIMED_MODEL / 1e9:.1f} GB",
            f"Llama-2-7B, float16: {_kv(32, 32, 128, 2, of=CLAIMED_MODEL)} of those; bundled model, float32: "
            f"{_kv(*shape, of=weights)} of its weights (arithmetic)",
            f"The claim leaves out the keys and values of the step's own tokens, (W+G)(N-1) = {STEP} at {SETTING}. "
            "Activations and logits of as many rows come on top.",
        ),
    ]


def _kv(layers: int, heads: int, width: int, size: int, of: float) -> str:
    token = 2 * layers * heads * width * size
    return (
        f"2 × {layers} layers × {heads} heads × {width} × {size} bytes = {token:,} bytes a token, × {STEP} = "
        f"{token * STEP / 2**20:.2f} MiB, {100 * token * STEP / of:.2f} %"
    )


def _parameters(file: Path) -> int:
    """Of the header: its length in eight bytes, then JSON."""
    with file.open("rb") as data:
        header = json.loads(data.read(int.from_bytes(data.read(8), "little")))
    return sum(math.prod(each["shape"]) for name, each in header.items() if name != "__metadata__")
