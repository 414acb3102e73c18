"""The interface of a target: open a sequence, read its prompt, run one forward over trees, commit the accepted path.

    session = target.open(tokens, params, capture)      returns at once; the prompt is not read yet
    while session.unread:
        rows = target.prefill(session, 512)             one forward over a chunk of the prompt
    choices = target.step([session], [tree])            ONE forward over the draft of every session
    session.commit(verify(tree, choices[0]))            keeps the cache entries of the path, discards the rest

Invariant, asserted by every target after a commit: the cache holds every committed token but the last; the last is the
root of the next tree. A recurrent state may lag behind: the tokens that it has not read yet ride at the head of the
next forward.

One thread at a time uses a target: whoever calls `open`, `prefill`, `fork`, `step` or a session holds `Target.lock`.
This module imports no backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from threading import RLock
from typing import Any, Protocol, runtime_checkable

from leapahead.core.errors import BadParameter, ContextOverflow, Refused
from leapahead.core.sampling import Sampler, SamplingParams
from leapahead.core.tree import TokenTree
from leapahead.core.verify import Verdict
from leapahead.models.choices import Choices, PromptRows
from leapahead.models.decoder import Decoder, longest_prompt, prompt_vocabulary

# Capabilities of a target.
CHAIN = "chain"  # several tokens of one path in one forward
TREE = "tree"  # branches too
BRANCHES = "branches"  # a few branches while one session runs, each at the price of a path of its own
LOGITS = "logits"  # logits of every node, given to drafters
TOP_K = "top_k"  # the k likeliest tokens after every node
HIDDEN = "hidden"  # hidden states of named layers
EMBEDDINGS = "embeddings"  # rows whose embeddings were added to the model's, see `models.embeddings`
ALL = frozenset({CHAIN, TREE, LOGITS, TOP_K, HIDDEN})

# Of a prompt, the top-k tokens are captured after its last rows only: choosing them costs time in every row.
PROMPT_ROWS = 256


@dataclass(frozen=True)
class Capture:
    """What a forward is asked to give beside the choices.

    Attributes:
        top_k: the number of likeliest tokens wanted after each row; 0 for none. A prompt gives them for its last
            `PROMPT_ROWS` rows.
        logits: whether unprocessed logits of tree nodes are read. They are of the target's kind and on its device.
        hidden: the layers whose hidden states are wanted, numbered as in Transformers' `output_hidden_states`: 0 is the
            embedding, i the output of layer i, -1 the last state after the final norm. Prompts give them for all rows.
        hidden_from: the first position of a prompt whose hidden states are wanted. Those of tokens that are taken from
            the cache are not computed, so no more of a prompt is taken from it.
    """

    top_k: int = 0
    logits: bool = False
    hidden: tuple[int, ...] = ()
    hidden_from: int = 0

    def __or__(self, other: Capture) -> Capture:
        """What serves both."""
        hidden = tuple(dict.fromkeys((*self.hidden, *other.hidden)))
        return Capture(max(self.top_k, other.top_k), self.logits or other.logits, hidden)

    def reusable(self, length: int, again: bool) -> int:
        """How many tokens of a prompt may be taken from the cache; its last one never is.

        Args:
            length: tokens of the prompt.
            again: whether at least one more is to be read.
        """
        most = max(0, length - 1 - again)
        return min(most, self.hidden_from) if self.hidden else most

    @property
    def needs(self) -> frozenset[str]:
        """The capabilities that a target must have to give it."""
        wanted = ((TOP_K, self.top_k > 0), (LOGITS, self.logits), (HIDDEN, bool(self.hidden)))
        return frozenset(name for name, is_wanted in wanted if is_wanted)


NOTHING = Capture()


@dataclass(frozen=True)
class TargetInfo:
    """What does not change while a target is loaded.

    Attributes:
        name: for reports and messages.
        vocab_size: length of a row of logits.
        context_length: greatest number of tokens of a sequence.
        precision: relative step of the coarsest numbers that it computes with, as 2**-7 for bfloat16: how far two
            computations that are equal in exact arithmetic may part.
        capabilities: of "chain", "tree", "branches", "logits", "top_k", "hidden" and "embeddings"; none: plain only.
        fingerprint: what the time of a forward depends on: model, precision, device, threads.
        padded: whether all sequences of a step take as many rows as the longest of them.
        replays: whether it has a recurrent state, which cannot discard tokens: of a draft that was not accepted whole,
            the committed tokens are read again at the head of the next forward (`Session.replay`).
        layers: number of layers; `Capture.hidden` names them up to this.
        hidden_size: width of one hidden state.
        exact: whether a token's logits are the same bits with every draft, batch and schedule. Steps then take a fixed
            number of rows, so that all trees of up to `max_nodes` nodes cost the same.
        bucket: steps with drafts have a multiple of so many rows, since another size takes longer; 1 for no padding.
        prepared: so many sizes of drafted steps stay prepared beside that of plain steps; 0: only the last forward's.
        cache_tokens: tokens that the KV cache of all sequences together can hold; 0 where that is not limited.
        reads_in_steps: so many tokens at a prompt's beginning are read in the forwards of steps, see `ReadsInSteps`.
        tuned_from: the model from which `leapahead train-cllm` or `train-probes` tuned this one; "" for none.
        mask_token: the token behind which it predicts further tokens when it drafts (PARD); -1 for none.
        decoder: how the decoder of an encoder-decoder model writes; None for all other models.
        suppressed: tokens that no text may have, by the model's configuration or the metadata of its file.
        devices: how many devices the branches of a tree are divided over.
        no_drafts: why it takes no drafts at all, where that is not its recurrent state; "" elsewhere.
        no_trees: what it was loaded with that rules out branches, as messages name it; "" for nothing.
        kv_cache: how sequences share the KV cache and why, where that was chosen automatically; "" elsewhere.
        length_option: what it is loaded with for a longer context, as messages name it; "" where that is fixed.
    """

    name: str
    vocab_size: int
    context_length: int
    precision: float
    capabilities: frozenset[str]
    fingerprint: str
    padded: bool = False
    replays: bool = False
    layers: int = 0
    hidden_size: int = 0
    exact: bool = False
    bucket: int = 1
    prepared: int = 0
    cache_tokens: int = 0
    reads_in_steps: int = 0
    tuned_from: str = ""
    mask_token: int = -1
    decoder: Decoder | None = None
    suppressed: tuple[int, ...] = ()
    devices: int = 1
    no_drafts: str = ""
    no_trees: str = ""
    kv_cache: str = ""
    length_option: str = ""

    @property
    def reference(self) -> str:
        """What "lossless" refers to where that is not obvious, as a sentence for reports; "" elsewhere."""
        what = f"Lossless with respect to the tuned model: {self.name} was tuned from"
        return f"{what} {self.tuned_from}, whose texts are others." if self.tuned_from else ""


@dataclass(frozen=True)
class Cost:
    """The size of one forward, on which its time depends.

    Attributes:
        rows: token rows of all sequences, padding and replayed tokens included.
        sequences: sequences of the forward.
        context: committed tokens of the longest of them.
        read: tokens of prompts, beside those rows.
    """

    rows: int
    sequences: int
    context: int
    read: int = 0


@runtime_checkable
class Session(Protocol):
    """One sequence of a target."""

    tokens: list[int]
    """Committed tokens, prompt included. To be read, never to be written."""
    sampler: Sampler

    @property
    def unread(self) -> int:
        """Tokens that are still to be read, of the prompt or again after an interrupt; never the last, the root."""

    @property
    def replay(self) -> int:
        """Committed tokens that ride at the head of the next forward, since the state lags behind them; usually 0."""

    def commit(self, verdict: Verdict) -> None:
        """Makes the verdict's path final and discards every other node of the last step's tree."""

    def close(self) -> None:
        """Gives the cache rows back. Closing twice is harmless."""


@runtime_checkable
class Target(Protocol):
    """A loaded model.

    Attributes:
        info: what does not change.
        lock: held by whoever uses the target; see the module.
        max_leaves: greatest number of leaves of a tree; it may fall while more sessions are open.
        max_nodes: the same of its nodes, the root counted.
    """

    info: TargetInfo
    lock: RLock

    @property
    def max_leaves(self) -> int: ...

    @property
    def max_nodes(self) -> int: ...

    def open(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        capture: Capture = NOTHING,
        reserve: int = 0,
        owner: str = "",
    ) -> Session:
        """A session for a prompt, which is not read yet. Returns at once.

        Args:
            tokens: the prompt.
            params: of the sampling.
            capture: what `prefill` is to give of the prompt's rows. It must be what the target can give.
            reserve: the length that the sequence may grow to, where it is known. A target whose sessions share a cache
                of fixed size keeps that much of it free.
            owner: of the prompt. Cache entries that are kept are shared by prompts of one owner only.

        Raises:
            BadParameter: no tokens, or one outside the vocabulary.
            ContextOverflow: the prompt leaves no room in the context.
            CacheFull: it does not fit beside the sessions that are open.
        """

    def prefill(self, session: Any, max_tokens: int) -> PromptRows | None:
        """ONE forward over the next unread tokens of the prompt, at most `max_tokens` of them.

        An exact target (`TargetInfo.exact`) reads chunks of a fixed size instead, the last one excepted.

        Returns:
            What the session's capture request asked for, of the rows read; None where it asked for nothing of them. To
            be read before the target's next forward.
        """

    def fork(self, session: Any, params: SamplingParams) -> Session:
        """A second session with the same committed tokens, all of them read, and its own sampler.

        Its cache entries are shared or copied, so the prefix is not computed again. The sampler counts all tokens so
        far as its prompt.

        Raises:
            CacheFull: it does not fit beside the sessions that are open.
        """

    def step(
        self,
        sessions: Sequence[Any],
        trees: Sequence[TokenTree],
        num_computed: Sequence[int] | None = None,
        capture: Capture = NOTHING,
    ) -> list[Choices]:
        """ONE forward for all trees, each over the last committed token of its session.

        Args:
            sessions: of this target, with their prompts read.
            trees: one for each session.
            num_computed: for each tree, how many of its nodes, the first ones, are those of the session's last step,
                not committed since. Only the nodes behind them go through the model, at least one of each tree, and
                have rows in the `Choices`. So a draft grows without being computed again. 0 by default.
            capture: what to keep of the rows beside the choices.
        """

    def cost(self, sessions: Sequence[Any], trees: Sequence[TokenTree]) -> Cost:
        """The size of the forward that `step` would run."""


@runtime_checkable
class ReadsInSteps(Protocol):
    """A target whose steps read prompts too, up to its `TargetInfo.reads_in_steps`."""

    def step_and_read(
        self, sessions: Sequence[Any], trees: Sequence[TokenTree], reads: Sequence[int], capture: Capture = NOTHING
    ) -> list[Choices]:
        """ONE forward for all trees, as `Target.step`, and for tokens of prompts.

        Args:
            sessions: of this target. One whose prompt is not read must not capture hidden states.
            trees: one for each session.
            reads: for each session, how many unread tokens of its prompt go through the model in front of its tree, at
                most. A session that has unread tokens left then takes no part in the step: its `Choices` have no rows,
                and nothing is to be committed.
            capture: what to keep of the rows of trees beside the choices.

        Returns:
            The choices; `Choices.prompt` has what the session's own capture request asked for, of the tokens read.
        """


@runtime_checkable
class SharesCache(Protocol):
    """A target whose sessions live in the cache of another target's sessions (an early exit of it).

    `open` with the live token list of a session of the other target costs nothing, and its commits are that session's.
    """

    def shares(self, tokens: Sequence[int]) -> bool:
        """Whether this is the token list, the very object, of such a session."""


@runtime_checkable
class KeepsPrefixes(Protocol):
    """A target that keeps the cache of closed sessions, so that a prompt with the same beginning is read faster."""

    def forget(self) -> None:
        """Releases what is kept of closed sessions; its memory too, where no forwards were prepared to use it."""


@runtime_checkable
class HoldsResources(Protocol):
    """A target that other processes compute for, or that keeps memory for captured forwards."""

    def close(self) -> None:
        """Ends them and releases it, when nobody opens further sessions. Closing twice is harmless."""


@runtime_checkable
class IdentifiesWeights(Protocol):
    """A target that tells its weights from those of another model of the same shapes, such as a fine-tune of it."""

    def weights_digest(self) -> str:
        """Hex digits that depend on the weights, equal in any process; "" where they cannot be read."""


def checked_prompt(tokens: Sequence[int], info: TargetInfo) -> list[int]:
    """The prompt of a new session, as plain integers.

    Raises:
        BadParameter: no tokens, or one outside the vocabulary.
        ContextOverflow: the prompt leaves no room in the context.
    """
    prompt, vocabulary = [int(token) for token in tokens], prompt_vocabulary(info.vocab_size, info.decoder)
    if not prompt:
        raise BadParameter("the prompt is empty; give at least one token")
    for token in prompt:
        if not 0 <= token < vocabulary:
            raise BadParameter(f"the prompt's token {token} is outside the vocabulary of {vocabulary}")
    if len(prompt) > (most := longest_prompt(info.context_length, info.decoder)):
        limit = most + (info.decoder is None)
        raise ContextOverflow(f"the prompt has {len(prompt)} tokens and the context {limit}; shorten the prompt")
    return prompt


def require(info: TargetInfo, needs: frozenset[str], what: str, remedy: str = "") -> None:
    """Refuses by name, before any work, what the target cannot give.

    Args:
        what: who needs it, as the message names it: "drafter 'lookahead'".
        remedy: what to do instead; by default, to use another drafter.

    Raises:
        Refused: a capability is missing.
    """
    missing = sorted(needs - info.capabilities)
    if missing:
        reason = ONE_PATH if info.replays and missing[0] == TREE else REASONS.get(missing[0], "")
        if info.exact or info.devices > 1:
            reason = " in exact mode" if info.exact else " on several devices"
        elif info.no_trees and missing[0] == TREE:
            reason = f" with {info.no_trees}"
        elif info.no_drafts and missing[0] in (CHAIN, TREE):
            reason = f" ({info.no_drafts})"
        chains = ", or one that drafts chains such as 'prompt_lookup'" * (info.capabilities >= {CHAIN})
        raise Refused(
            f"{what} needs {' and '.join(missing)} from the target, which {info.name} does not have{reason}; "
            + (remedy or f"use drafter='plain'{chains}")
        )


REASONS = {
    TREE: " (its attention cannot be given a tree mask)",
    CHAIN: " (its recurrent state cannot discard rejected tokens)",
    HIDDEN: " (its backend does not give hidden states)",
    EMBEDDINGS: " (only models of Transformers with tree attention take other embeddings than those of tokens)",
}
ONE_PATH = " (its recurrent layers read the tokens of one path)"


def read_prompt(target: Target, session: Session, chunk: int = 512) -> list[PromptRows]:
    """Reads a whole prompt; returns the captured rows, of which those in borrowed memory expire with the next chunk."""
    found = []
    while session.unread:
        if (rows := target.prefill(session, chunk)) is not None:
            found.append(rows)
    return found
