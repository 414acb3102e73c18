"""Gumbel noise as a function of (seed, position, token), which makes sampling independent of what was drafted.

The token at a position is `argmax(scores + noise)`, a sample of softmax(scores) (the Gumbel-max trick). The noise comes
from a counter-based generator, Philox-4x64-10 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3), so that of
any tokens is computed alone:

    key      (seed, position)
    counter  token // 8 + 1; it gives four numbers of 64 bits, which are eight words of 32 bits, low halves first
    word     the one at token % 8
    noise    -log(-log((word + 0.5) / 2**32)) in float64, rounded to float32: from -3.13 to 22.88

The words are the same on every machine and in every version; numpy guarantees its raw bits, but not its distributions.
The logarithms are the array library's, so that noise may differ in its last bit between libraries and machines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from array_api_compat import array_namespace, device

from leapahead import native

Array = Any  # a numpy array or a torch tensor
FloatArray = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint32]

BLOCK = 8  # words of a counter
ROUNDS = 10
MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
KEY_STEPS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)  # added to the key after each round
LOW = 2**32 - 1
ALONE = 10 if native.available else 1300  # a word asked for alone takes as long as so many of a whole vocabulary
KEPT = 64  # positions whose words are kept at most
UNUSUAL = 6.0  # a noise that few tokens exceed
UNUSUAL_WORD = math.floor(2**32 * math.exp(-math.exp(-UNUSUAL)))  # the noise of lower words is at most that
TOGETHER, MOST_TOGETHER = 2**20, 16  # noises and positions that a device makes at once at most


def gumbel(words: Array) -> Array:
    """float32, the noise of some words: unsigned 32-bit integers in any integer type."""
    if isinstance(words, np.ndarray):  # without what finds the library, which takes longer than few words do
        return _noise(words.astype(np.float64), np).astype(np.float32)
    xp = array_namespace(words)
    return xp.astype(_noise(xp.astype(words, xp.float64), xp), xp.float32)


def _noise(words: Array, xp: Any) -> Array:
    uniform = (words + 0.5) * 2.0**-32  # in the open interval (0, 1)
    return -xp.log(-xp.log(uniform))


def all_words(seed: int, position: int, vocab_size: int) -> Words:
    """uint32 [vocab], the words of all tokens at a position."""
    raw = _generator(seed, position).random_raw((vocab_size + 1) // 2)
    return raw.astype("<u8", copy=False).view("<u4")[:vocab_size]


def words(seed: int, position: int, tokens: npt.NDArray[np.int64]) -> Words:
    """uint32 [tokens], the words of some tokens at a position, each block computed alone."""
    return native.module.words(seed, position, tokens) if native.available else _words(seed, position, tokens)


def _words(seed: int, position: int, tokens: npt.NDArray[np.int64]) -> Words:
    counters, place = np.unique(tokens // BLOCK, return_inverse=True)
    generator, following, raw = _generator(seed, position), 0, []
    for counter in counters.tolist():
        generator.advance(counter - following)
        raw.append(generator.random_raw(BLOCK // 2))
        following = counter + 1
    found = np.concatenate(raw or [np.zeros(0, dtype=np.uint64)]).astype("<u8", copy=False).view("<u4")
    some: Words = found[BLOCK * place + tokens % BLOCK]
    return some


def _generator(seed: int, position: int) -> np.random.Philox:
    return np.random.Philox(key=np.array([seed, position], dtype=np.uint64))


class GumbelNoise:
    """The noise of all positions of one seed, on the host.

    Args:
        seed: from 0 to 2**64 - 1.
        vocab_size: number of tokens.
    """

    def __init__(self, seed: int, vocab_size: int) -> None:
        self.seed = seed
        self.vocab_size = vocab_size
        self._kept: dict[int, Words] = {}
        self._asked: dict[int, int] = {}  # position -> words that were computed alone

    def at(self, position: int) -> FloatArray:
        """float32 [vocab]; the noise of the token *at* `position`."""
        return np.asarray(gumbel(self.words(position)))

    def of(self, position: int, tokens: npt.NDArray[np.int64]) -> FloatArray:
        """float32 [tokens], `at(position)[tokens]` computed for these tokens alone, unless very many are asked for."""
        kept = self._kept.get(position)
        if kept is None:
            self._asked[position] = asked = self._asked.get(position, 0) + len(tokens)
            if asked * ALONE < self.vocab_size:
                return np.asarray(gumbel(words(self.seed, position, tokens)))
            kept = self.words(position)
        return np.asarray(gumbel(kept[tokens]))

    def leader(self, position: int, scores: npt.NDArray[Any]) -> int:
        """The token with the greatest sum of score and noise; of equal sums the lowest, and -1 where none is finite.

        Args:
            position: of the noise.
            scores: float [vocab].
        """
        some = self.leaders(position, scores)
        if len(some) <= 1:
            return some[0] if some else -1
        tokens = np.array(some)
        with np.errstate(all="ignore"):  # here and below: scores may be huge
            return int(tokens[np.argmax(scores[tokens] + self.of(position, tokens))])

    def leaders(self, position: int, scores: npt.NDArray[Any]) -> list[int]:
        """The tokens, rising, of which one is the `leader`; none where the greatest score is NaN or infinite.

        The compiled module knows the logarithms but for their last bits, so it usually leaves one token.
        """
        if native.available and scores.dtype == np.float32 and scores.flags.c_contiguous:
            return native.module.leaders(scores, self.seed, position, UNUSUAL, UNUSUAL_WORD)
        best = int(scores.argmax())  # that of a NaN or of +inf if there is one
        with np.errstate(all="ignore"):
            return self._contenders(position, scores, best) if math.isfinite(scores[best]) else []

    def _contenders(self, position: int, scores: npt.NDArray[Any], best: int) -> list[int]:
        """The tokens that can have the greatest sum of score and noise, without the noise of all tokens.

        The token `best` has some sum. To reach it, a token needs a score at most `UNUSUAL` below it, or a noise above
        `UNUSUAL`, which 1 token in 400 has. The noise rises with its word, and sums are rounded monotonically.
        """
        reached = scores[best] + self.of(position, np.array([best]))  # [1], of the dtype of all sums
        near = reached - UNUSUAL - 0.01
        if not near + (UNUSUAL + 0.001) < reached:  # where scores are huge, rounding exceeds the difference
            return list(range(len(scores)))
        found: list[int] = np.flatnonzero((scores >= near) | (self.words(position) >= UNUSUAL_WORD)).tolist()
        return found

    def words(self, position: int) -> Words:
        """uint32 [vocab], the words of a position: noise rises with them. Kept until `drop_before`."""
        kept = self._kept.get(position)
        if kept is None:
            if len(self._kept) == KEPT:
                del self._kept[next(iter(self._kept))]
            kept = self._kept[position] = all_words(self.seed, position, self.vocab_size)
        return kept

    def drop_before(self, before: int) -> None:
        """Drops what is kept of all positions below `before`."""
        for kept in (self._kept, self._asked):
            if kept:
                for position in [p for p in kept if p < before]:
                    del kept[position]


class DeviceNoise:
    """The noise of all positions of one seed, made on a device.

    Several positions are made together, because an operation on a device takes its start, whatever its size.

    Args:
        seed: from 0 to 2**64 - 1.
        vocab_size: number of tokens.
    """

    def __init__(self, seed: int, vocab_size: int) -> None:
        self.seed = seed
        self.vocab_size = vocab_size
        self.together = max(1, min(MOST_TOGETHER, TOGETHER // vocab_size))
        self._kept: dict[int, Array] = {}  # first position // `together` -> float32 [together, vocab]

    def at(self, positions: Sequence[int], like: Array) -> Array:
        """float32 [positions, vocab], on the device of the array `like`."""
        found = self.rows(positions, like)
        return found[0][None, :] if len(found) == 1 else array_namespace(like).stack(found)

    def rows(self, positions: Sequence[int], like: Array) -> list[Array]:
        """float32 [vocab] for each of the positions."""
        found = []
        for part, row in (divmod(position, self.together) for position in positions):
            if part not in self._kept:
                self._kept[part] = self._made(range(part * self.together, (part + 1) * self.together), like)
            found.append(self._kept[part][row])
        return found

    def drop_before(self, before: int) -> None:
        """Drops what is kept of positions below `before`."""
        for part in [part for part in self._kept if (part + 1) * self.together <= before]:
            del self._kept[part]

    def _made(self, positions: range, like: Array) -> Array:
        xp, place = array_namespace(like), device(like)
        if place.type == "mps":  # it has no float64
            words = [all_words(self.seed, position, self.vocab_size) for position in positions]
            return xp.asarray(gumbel(np.stack(words)), device=place)
        counters = xp.arange(-(-self.vocab_size // BLOCK), device=place)
        return gumbel(blocks(self.seed, positions, counters)[:, : self.vocab_size])


def blocks(seed: int, positions: range, counters: Array) -> Array:
    """int64 [positions, 8 * counters], the words of whole blocks of tokens, made on the device of the counters.

    Nothing is copied there, so that nobody waits for what it is doing.

    Args:
        seed: from 0 to 2**64 - 1.
        positions: the keys beside the seed; one after the other.
        counters: int64 [counters]; block `c` is that of the tokens `8 * c` to `8 * c + 7`.
    """
    xp = array_namespace(counters)
    places = xp.arange(positions.start, positions.stop, device=device(counters))[:, None]
    rounds = xp.arange(ROUNDS, device=device(counters))[:, None, None]
    of_seed = xp.zeros_like(places) + (rounds * _signed(KEY_STEPS[0]) + _signed(seed))
    keys = xp.stack((of_seed, places + rounds * _signed(KEY_STEPS[1])), axis=1)  # [rounds, 2, positions, 1]

    def pair(numbers: Sequence[int]) -> Array:
        """int64 [2, 1, 1]."""
        return xp.stack([xp.full((1, 1), number, dtype=xp.int64, device=device(counters)) for number in numbers])

    low, high = pair([m & LOW for m in MULTIPLIERS]), pair([m >> 32 for m in MULTIPLIERS])
    whole = pair([_signed(m) for m in MULTIPLIERS])
    even = xp.stack((counters + 1, xp.zeros_like(counters)))[:, None, :]  # numbers 0 and 2 of each block
    odd = xp.zeros_like(even)  # numbers 3 and 1
    for r in range(ROUNDS):
        even, odd = xp.flip(_upper(even, low, high) ^ odd, axis=0) ^ keys[r], even * whole
    numbers = xp.stack((even[0], odd[1], even[1], odd[0]), axis=-1)  # [positions, counters, 4]
    halves = xp.stack((numbers & LOW, (numbers >> 32) & LOW), axis=-1)
    return xp.reshape(halves, (len(positions), -1))


def _signed(number: int) -> int:
    """The number of the same 64 bits that int64 has: sums and products are modulo 2**64 in any case."""
    return (number + 2**63) % 2**64 - 2**63


def _upper(x: Array, low: Array, high: Array) -> Array:
    """The upper 64 bits of `x * (high * 2**32 + low)`, as unsigned numbers in int64."""
    x_low, x_high = x & LOW, (x >> 32) & LOW
    carry = high * x_low + ((low * x_low >> 32) & LOW)
    middle = low * x_high + (carry & LOW)
    return high * x_high + ((carry >> 32) & LOW) + ((middle >> 32) & LOW)
