"""How the target chooses a token: processed logits plus the Gumbel noise of the position, argmax.

    choice(node) = argmax( processed(logits[node]) + g[position(node) + 1] )

Greedy decoding leaves g out. With temperature, g is Gumbel noise that is a function of (seed, position) alone, so the
choice after a node depends on its prefix and its position only: the committed text is the one that plain decoding
samples with that seed, whatever was drafted (Gumbel-max coupling, Daliri et al., 2408.07978).

Written once for numpy and torch arrays through the Python array API; this module imports no backend. It knows neither
caches nor drafters.

Terms:
    scores: logits after penalties, bans, the user's processors, temperature and filters; -inf where banned.
    prefix of a node: the committed tokens, the root among them, then the drafted ones from below the root to the node.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from array_api_compat import array_namespace

from leapahead.core.arrays import chosen_of, floats, on_host
from leapahead.core.bad_words import BadWords
from leapahead.core.errors import BadLogits, BadParameter
from leapahead.core.filters import floors
from leapahead.core.grammar import CompiledGrammar, GrammarState
from leapahead.core.noise import DeviceNoise, GumbelNoise
from leapahead.core.parameters import LARGEST, finite, is_whole, number, token_ids, whole
from leapahead.core.penalties import Penalties
from leapahead.core.processors import LogitsProcessor, Prefix, PrefixFree, processed
from leapahead.core.tree import IntArray, TokenTree

Array = Any  # a numpy array or a torch tensor: whatever the target's logits are

FloatArray = npt.NDArray[np.floating[Any]]

LEAST_TEMPERATURE = 1e-6  # below it, logits / temperature may overflow in float32
MULTIPLIER = "a finite number > 0 (1 is off) whose reciprocal is finite in float32 too"
UNSETTLED = -2  # in place of a choice that waits for `choose(..., settle=True)`


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """What the target does with its logits, in the order of the attributes: as in Transformers but for `forced`.

    Attributes:
        bad_words: token sequences that must not appear.
        min_new_tokens: as long as there are fewer new tokens, the `eos_token_ids` are banned.
        eos_token_ids: see `min_new_tokens`.
        repetition_penalty: > 0; logits of tokens in the prompt or the output are divided by it where positive and
            multiplied where negative (CTRL, 1909.05858). 1 is off.
        presence_penalty: subtracted once from the logit of every token of the output so far.
        frequency_penalty: subtracted as often as the token is in the output so far.
        processors: the user's own, see `LogitsProcessor`.
        forced: pairs of a number of tokens, prompt included, and the ids of which one is chosen after so many.
        grammar: the form of the text: tokens that it does not allow are banned. None for any text.
        temperature: 0 for greedy decoding, which skips the filters below, or at least `LEAST_TEMPERATURE`, and
            finite in float32.
        top_k: keep the k likeliest tokens (all tokens that tie with the last of them stay). 0 is off.
        top_p: keep the likeliest tokens until their mass reaches p. 1 is off.
        min_p: keep tokens at least min_p times as likely as the likeliest. 0 is off.
        seed: of the Gumbel noise; 0 <= seed < 2**64.

    Raises:
        BadParameter: a value is impossible; the message names it.
    """

    bad_words: tuple[tuple[int, ...], ...] = ()
    min_new_tokens: int = 0
    eos_token_ids: tuple[int, ...] = ()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    processors: tuple[LogitsProcessor, ...] = ()
    forced: tuple[tuple[int, tuple[int, ...]], ...] = ()
    grammar: CompiledGrammar | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        def check(name: str, rule: str, is_possible: Callable[[float], bool]) -> None:
            value = number(getattr(self, name))
            if value is None or not is_possible(value):  # comparisons with NaN are false
                raise BadParameter(f"{name}={getattr(self, name)!r} is not possible: it must be {rule}")
            object.__setattr__(self, name, value)

        for name in ("bad_words", "processors"):
            if not isinstance(getattr(self, name), tuple):
                raise BadParameter(f"{name}={getattr(self, name)!r} is not possible: it must be a tuple")
        if not all(
            isinstance(word, Sequence) and len(word) > 0 and all(map(is_whole, word)) for word in self.bad_words
        ):
            raise BadParameter(
                f"bad_words={self.bad_words!r} is not possible: it must be made of non-empty sequences of token ids"
            )
        if not (self.grammar is None or isinstance(self.grammar, CompiledGrammar)):
            raise BadParameter(f"grammar={self.grammar!r} is not possible: it must be a compiled grammar, or None")
        object.__setattr__(self, "bad_words", tuple(tuple(map(int, word)) for word in self.bad_words))
        object.__setattr__(self, "eos_token_ids", token_ids("eos_token_ids", self.eos_token_ids))
        for name in ("min_new_tokens", "top_k", "seed"):
            object.__setattr__(self, name, whole(name, getattr(self, name)))
        check("seed", "a whole number from 0 to 2**64 - 1", lambda value: value < 2**64)
        check("repetition_penalty", MULTIPLIER, lambda value: 1 / LARGEST <= value <= LARGEST)
        for name in ("presence_penalty", "frequency_penalty"):
            object.__setattr__(self, name, finite(name, getattr(self, name)))
        check(
            "temperature",
            f"0 (greedy decoding), or from {LEAST_TEMPERATURE:g} to {LARGEST:.2g}, the greatest number of float32",
            lambda value: value == 0 or LEAST_TEMPERATURE <= value <= LARGEST,
        )
        check("top_p", "above 0 and at most 1", lambda value: 0 < value <= 1)
        check("min_p", "between 0 and 1", lambda value: 0 <= value <= 1)

    def of(self, seed: int, grammar: CompiledGrammar | None) -> SamplingParams:
        """The parameters of another text. What is long, such as the bad words, is shared, and not checked again."""
        found, own = copy(self), SamplingParams(seed=seed, grammar=grammar)
        found.__dict__.update(seed=own.seed, grammar=own.grammar)
        return found


class Sampler:
    """Chooses tokens for one session: its parameters, its noise, and the token counts that its penalties need.

    Args:
        params: see `SamplingParams`.
        tokens: the session's committed tokens, live; the first of them are the prompt.
        vocab_size: length of a row of logits.
        to_array: moves a numpy array to the kind and device of the logits that are processed.
        from_target: moves the target's logits there, if they are not processed where they are.
        on_device: whether everything is computed where the logits are, the noise of all tokens too. Otherwise they must
            be in the host's memory, where the noise of few tokens is computed.

    Attributes:
        noise: of the positions; None for greedy decoding.
        grammar: along these tokens; None where the text may have any form.

    Raises:
        BadParameter: a token of the parameters is outside the vocabulary.
    """

    def __init__(
        self,
        params: SamplingParams,
        tokens: list[int],
        vocab_size: int,
        to_array: Callable[[npt.NDArray[Any]], Array] = lambda array: array,
        from_target: Callable[[Array], Array] = lambda logits: logits,
        on_device: bool = False,
    ) -> None:
        forced = [tokens for _, tokens in params.forced]
        for name, words in (
            ("bad_words", params.bad_words),
            ("forced", forced),
            ("eos_token_ids", [params.eos_token_ids]),
        ):
            for token in (token for word in words for token in word):
                if not 0 <= token < vocab_size:
                    raise BadParameter(f"{name}: token {token} is outside the vocabulary of {vocab_size}")
        self.params = params
        self.tokens = tokens
        self.vocab_size = vocab_size
        self.prompt_length = self._counted = len(tokens)
        self.noise = GumbelNoise(params.seed, vocab_size) if params.temperature > 0 else None
        self._device_noise = DeviceNoise(params.seed, vocab_size) if on_device and self.noise is not None else None
        self.grammar: GrammarState | None = (
            None if params.grammar is None else params.grammar.follow(tokens, vocab_size)
        )
        self._to_array, self._from_target, self._on_device = to_array, from_target, on_device
        p = params
        self._penalties: Penalties | None = None
        if (p.repetition_penalty, p.presence_penalty, p.frequency_penalty) != (1.0, 0.0, 0.0):
            self._penalties = Penalties(
                p.repetition_penalty, p.presence_penalty, p.frequency_penalty, tokens, vocab_size, to_array
            )
        self._bad_words = BadWords(p.bad_words, to_array)
        self._prefix = Prefix(tokens)
        # Without these, a row of scores does not depend on its prefix, and all rows are processed together.
        self._forced = dict(p.forced)
        changes = p.bad_words or p.forced or p.min_new_tokens or p.processors or p.grammar
        self._plain_rows = not (self._penalties or changes)
        self._filtered = 0 < p.top_k < vocab_size or p.top_p < 1 or p.min_p > 0
        self._takes_leader = self.noise is not None and self._plain_rows and not (self._filtered or on_device)

    def committed(self) -> None:
        """To be called after `tokens` grew. Takes time in the number of new tokens only."""
        if self._penalties is not None:
            self._penalties.count(self.tokens[self._counted :])
        self._counted = len(self.tokens)
        if self.noise is not None:
            self.noise.drop_before(self._counted)
        if self._device_noise is not None:
            self._device_noise.drop_before(self._counted)

    @property
    def takes_argmax(self) -> bool:
        """Whether a choice is the argmax of its row of logits, whatever the tree and the text."""
        return self.noise is None and self._plain_rows

    @property
    def alike(self) -> object:
        """Equal for samplers whose rows are chosen by the same operations, see `choose_together`; None for others."""
        p = self.params
        return (p.temperature, p.top_k, p.top_p, p.min_p) if self._device_noise and self._plain_rows else None

    def choose(
        self, logits: Array, tree: TokenTree, nodes: IntArray, length: int | None = None, settle: bool = True
    ) -> Array:
        """The target's own next token after each of `nodes`.

        Args:
            logits: float [rows, vocab], of any float type; row i belongs to nodes[i].
            tree: the draft over the last committed token.
            nodes: int64 [rows].
            length: how many tokens were committed when the tree was drafted; by default all that are now.
            settle: whether every choice is made. Without, a choice is `UNSETTLED` where the next thing to do depends
                on what the device has found, so that nothing waits for the device.

        Returns:
            int64 [rows], of the kind that is processed; -1 where no token can be chosen (see `checked`). Of equal
            scores the lowest id is chosen.
        """
        if self.takes_argmax:
            return chosen_of(self._from_target(logits))  # nothing to change, so nothing to copy
        length = len(self.tokens) if length is None else length
        if self._takes_leader and len(logits) == 1 and isinstance(logits, np.ndarray):  # with the fewest operations
            assert self.noise is not None
            scores = floats(logits[0], copy=False)
            if self.params.temperature != 1:
                with np.errstate(all="ignore"):
                    scores = self._tempered(scores)
            return self._to_array(np.array([self.noise.leader(length + tree.depth_list[int(nodes[0])], scores)]))
        scores = self.unfiltered(logits, tree, nodes, length)
        if self.noise is None:
            return chosen_of(scores) if self._on_device else self._to_array(chosen_of(on_host(scores)))
        positions = [length + tree.depth_list[node] for node in nodes.tolist()]
        with np.errstate(all="ignore"):  # bad logits are reported once, by `checked`
            if self._device_noise is not None:
                return self._sampled_on_device(scores, self._device_noise.at(positions, scores), settle)
            lowest = self._floors(scores)[0]
            least = [None] * len(positions) if lowest is None else lowest[:, 0].tolist()
            drawn = map(self._sampled, on_host(scores), least, positions)
            return self._to_array(np.fromiter(drawn, np.int64, len(positions)))

    def _sampled(self, scores: FloatArray, floor: float | None, position: int) -> int:
        """The choice of one row: of the tokens from the floor on, the one with the greatest sum of score and noise.

        Args:
            scores: float [vocab].
            floor: the least score that the filters keep; None without filters.
            position: of the token that is chosen.
        """
        assert self.noise is not None
        if floor is None:
            return self.noise.leader(position, scores)
        best = int(scores.argmax())  # that of a NaN or of +inf if there is one
        if not math.isfinite(scores[best]):
            return -1
        some = np.flatnonzero(scores >= floor)
        return int(some[0] if len(some) == 1 else some[np.argmax(scores[some] + self.noise.of(position, some))])

    def _sampled_on_device(self, scores: Array, noise: Array, settle: bool) -> Array:
        xp = array_namespace(scores)
        floor, settled = self._floors(scores, settle)
        if floor is not None:
            scores = xp.where(scores < floor, -math.inf, scores)
        chosen = chosen_of(scores + noise)
        return chosen if settled is None else xp.where(settled, chosen, UNSETTLED)

    def _floors(self, scores: Array, settle: bool = True) -> tuple[Array, Array]:
        p = self.params
        return floors(scores, p.top_k, p.top_p, p.min_p, settle) if self._filtered else (None, None)

    def scores(self, logits: Array, tree: TokenTree, nodes: IntArray, length: int | None = None) -> Array:
        """float32 or float64 [rows, vocab]; a new array: log-probabilities up to a constant, -inf where banned."""
        length = len(self.tokens) if length is None else length
        scores = self.unfiltered(logits, tree, nodes, length)
        xp = array_namespace(scores)
        if self.params.temperature > 0 and self._filtered:
            with np.errstate(all="ignore"):
                return xp.where(scores < self._floors(scores)[0], -math.inf, scores)
        return xp.astype(scores, scores.dtype, copy=True)

    def unfiltered(self, logits: Array, tree: TokenTree, nodes: IntArray, length: int) -> Array:
        """float32 or float64 [rows, vocab], the scores before top-k, top-p and min-p; perhaps the logits themselves."""
        scores = floats(self._from_target(logits), copy=not self._plain_rows)
        if not self._plain_rows:
            paths = [tree.path_tokens(node) for node in nodes.tolist()]
            if len(self._bad_words.always):
                scores[:, self._bad_words.always] = -math.inf
            banned = [(row, token) for row, path in enumerate(paths) for token in self._banned(path, length)]
            if banned:
                at = self._to_array(np.array(banned).T.copy())
                scores[at[0], at[1]] = -math.inf
            if self._penalties is not None:
                self._penalties.apply(scores, paths, self.tokens[length : self._counted])
            scores = self._call_processors(scores, tree, nodes, length)
            for row, path in enumerate(paths) if self._forced else ():
                if (wanted := self._forced.get(length + len(path))) is not None:
                    scores[row] = -math.inf
                    scores[row, self._to_array(np.array(wanted))] = 0.0
            if self.grammar is not None:
                allowed = np.stack([self.grammar.mask(length, path) for path in paths])
                scores = array_namespace(scores).where(self._to_array(allowed), scores, -math.inf)
        with np.errstate(all="ignore"):
            return self._tempered(scores)

    def _tempered(self, scores: Array) -> Array:
        """Scores over the temperature; the array itself where that changes nothing."""
        return scores if self.params.temperature in (0, 1) else scores / self.params.temperature

    def _banned(self, path: list[int], committed: int) -> list[int]:
        """The tokens that may not follow a node, beside those that never may."""
        p, length = self.params, committed + len(path)
        found = list(p.eos_token_ids) if length - self.prompt_length < p.min_new_tokens else []
        return [*found, *self._bad_words.completing(self.tokens, committed, path)]

    def _call_processors(self, scores: Array, tree: TokenTree, nodes: IntArray, length: int) -> Array:
        """Calls each processor for every node with its own prefix: one call per depth, or one in all if prefix-free."""
        xp = array_namespace(scores)
        depths = tree.depths[nodes]
        groups = [np.flatnonzero(depths == depth) for depth in np.unique(depths)] if self.params.processors else []
        for processor in self.params.processors:
            is_free, found = isinstance(processor, PrefixFree), list[Array]()
            for rows in [np.arange(len(nodes))] if is_free else groups:
                paths = [[]] if is_free else [tree.path_tokens(int(nodes[row])) for row in rows]
                committed = self._prefix.first(0 if is_free else length)  # a long text is not copied for nothing
                prefixes = np.stack([np.concatenate([committed, np.array(path, dtype=np.int64)]) for path in paths])
                given = scores if len(rows) == len(nodes) else scores[self._to_array(rows)]
                # A copy of several, since it may be an array that the processor writes to again.
                found.append(floats(processed(processor, self._to_array(prefixes), given), copy=given is not scores))
            # The type that it returns counts with and without a draft, so that the choice does not depend on one.
            scores = found[0] if len(found) == 1 else xp.concat(found)[self._to_array(np.argsort(np.hstack(groups)))]
        # A processor may return an array that it keeps, or a view that repeats one row: it must not be written to.
        return xp.astype(scores, scores.dtype, copy=True) if self.params.processors else scores

    def rank(self, position: int, tokens: npt.ArrayLike, logp: npt.ArrayLike) -> IntArray:
        """The order in which a drafter should try candidates for `position`, best first.

        Args:
            position: of the candidates.
            tokens: int [candidates], best first by the drafter's own estimate.
            logp: float [candidates], that estimate: log-probabilities up to a constant.

        Returns:
            int64 [candidates], indices. The identity when greedy; when sampling, by falling `logp / T + g[position]`:
            the order of this seed's choice if the estimate is right. It affects acceptance only, never the text.
        """
        scores = self.noisy_scores(position, tokens, logp)
        return np.arange(np.size(tokens)) if scores is None else np.argsort(-scores, kind="stable")

    def noisy_scores(self, position: int, tokens: npt.ArrayLike, logp: npt.ArrayLike) -> npt.NDArray[np.float64] | None:
        """float64 [candidates], `logp / T + g[position]`, see `rank`; None when greedy."""
        if self.noise is None:
            return None
        scores: npt.NDArray[np.float64] = np.asarray(logp, dtype=np.float64) / self.params.temperature + self.noise.of(
            position, np.asarray(tokens, dtype=np.int64)
        )
        return scores


def choose_together(samplers: Sequence[Sampler], trees: Sequence[TokenTree], logits: Array) -> Array:
    """What each sampler would choose after all nodes of its tree without settling, in as few operations as for one.

    Args:
        samplers, trees: one for each session; the samplers are `alike`.
        logits: float [rows of all sessions, vocab].
    """
    scores = samplers[0]._tempered(floats(samplers[0]._from_target(logits), copy=False))
    noise = list[Array]()
    for sampler, tree in zip(samplers, trees, strict=True):
        assert sampler._device_noise is not None
        noise += sampler._device_noise.rows([len(sampler.tokens) + depth for depth in tree.depth_list], scores)
    return samplers[0]._sampled_on_device(scores, array_namespace(scores).stack(noise), settle=False)


def checked(chosen: Sequence[int] | IntArray, where: str) -> IntArray:
    """`chosen` as int64 on the host.

    Raises:
        BadLogits: a choice is -1, so the logits held NaN, +inf, or nothing but -inf.
    """
    if min(chosen, default=0) < 0:
        raise BadLogits(
            f"the logits of {where} are NaN, infinite or all banned, so no token can be chosen; try float32, or look "
            "for the logits processor, bad word, penalty or grammar that bans every token"
        )
    return np.asarray(chosen, dtype=np.int64)
