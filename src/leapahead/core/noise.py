"""Gumbel noise as a function of (seed, position), which makes sampling independent of what was drafted.

The token at a position is `argmax(scores + noise)`, a sample of softmax(scores) (the Gumbel-max trick).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]


class GumbelNoise:
    """The noise of all positions of one seed: the same numbers on every machine and in every version.

    Each position has its own counter-based generator, Philox, with (seed, position) as the key. Its raw bits are turned
    into noise here, because numpy guarantees the bits to stay the same in later versions, but not its distributions.

    Args:
        seed: from 0 to 2**64 - 1.
        vocab_size: length of the noise of a position.
    """

    def __init__(self, seed: int, vocab_size: int) -> None:
        self.seed = seed
        self.vocab_size = vocab_size
        self._kept: dict[int, FloatArray] = {}

    def at(self, position: int) -> FloatArray:
        """float32 [vocab]; the noise of the token *at* `position`. Kept until `drop_before`."""
        kept = self._kept.get(position)
        if kept is None:
            generator = np.random.Philox(key=np.array([self.seed, position], dtype=np.uint64))
            raw = generator.random_raw((self.vocab_size + 1) // 2).astype("<u8", copy=False)
            noise = raw.view("<u4")[: self.vocab_size].astype(np.float64)
            noise += 0.5  # in place: a new array for each operation doubles the time
            noise *= 2.0**-32  # uniform in the open interval (0, 1)
            for _ in range(2):  # -log(-log(uniform))
                np.negative(np.log(noise, out=noise), out=noise)
            kept = self._kept[position] = noise.astype(np.float32)
        return kept

    def drop_before(self, before: int) -> None:
        """Drops the noise of all positions below `before`."""
        for position in [p for p in self._kept if p < before]:
            del self._kept[position]
