"""GGUF files under llama.cpp with the same bits for every draft, batch and schedule.

    a step        one forward of `STEP_ROWS` tokens for each sequence: the root, the draft, padding
    a prompt      forwards of `CHUNK` tokens, which begin and end at multiples of `CHUNK`; padded

llama.cpp chooses its kernels by the number of tokens, and its attention adds up in the order of the cells. So the
number of tokens is fixed, every sequence has cells of its own, in which each token lies at its position, and drafts are
chains: the cells of what is not accepted are behind all others, and are freed. Flash attention divides the cells among
threads, and is off. Whether this holds for a model on this machine is tested when it is loaded.

Cells of a prompt and cells of a step are computed by forwards of different sizes; only the first are kept for prompts
to come, as far as they are whole chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from leapahead.core.errors import BadParameter, LeapaheadError, Refused, first_line
from leapahead.core.sampling import SamplingParams
from leapahead.core.tree import TokenTree
from leapahead.models.base import CHAIN, LOGITS, NOTHING, TOP_K, Capture
from leapahead.models.choices import Choices
from leapahead.models.llama_cpp import selftest
from leapahead.models.llama_cpp.context import Context, Model, Outputs
from leapahead.models.llama_cpp.model import LlamaCppTarget
from leapahead.models.llama_cpp.options import LlamaCppOptions
from leapahead.models.llama_cpp.session import LlamaCppSession, check_step

STEP_ROWS = 8
CHUNK = 64
PADDING = 0  # the token of padding rows


class ExactLlamaCppTarget(LlamaCppTarget):
    """A GGUF file in exact mode; see `LlamaCppTarget`.

    Args:
        options: of the context. Every sequence has `n_ctx` cells of its own, and `n_seq_max` is 1 by default: a forward
            reads one sequence, so that several at a time are not faster.

    Raises:
        BadParameter: options with which nothing is exact.
        Refused: the model cannot be decoded exactly.
    """

    chains_only = "in exact mode"

    def __init__(self, model: Model, options: LlamaCppOptions | None = None, name: str | None = None) -> None:
        options = options or LlamaCppOptions()
        if options.flash_attn:
            raise BadParameter("flash_attn=True is not possible in exact mode: it divides the cells among threads")
        if options.kv_unified:
            raise BadParameter(
                "kv_unified=True is not possible in exact mode, where every sequence has cells of its own; leave it out"
            )
        if options.n_gpu_layers:
            raise BadParameter(f"n_gpu_layers={options.n_gpu_layers} is not possible in exact mode, which uses the CPU")
        if min(options.n_batch, options.n_ubatch) < CHUNK:
            raise BadParameter(
                f"n_batch={options.n_batch} and n_ubatch={options.n_ubatch} are not possible in exact mode, whose "
                f"forwards have up to {CHUNK} tokens; give {CHUNK} or more"
            )
        if model.stateful:
            raise Refused(f"{model.path!r} cannot be decoded in exact mode (it has recurrent layers); leave out exact")
        super().__init__(model, replace(options, flash_attn=False, n_seq_max=options.n_seq_max or 1), name)
        self.info = replace(self.info, exact=True, reads_in_steps=0, fingerprint=f"{self.info.fingerprint} exact")
        self._cells.whole, self._cells.texts.most_tokens = CHUNK, 0

    @property
    def max_leaves(self) -> int:
        return 1

    @property
    def max_nodes(self) -> int:
        return STEP_ROWS

    def _make_context(self, model: Model, options: LlamaCppOptions) -> Context:
        return Context(model, options, beyond=CHUNK)

    def _tested(self) -> frozenset[str]:
        """See `LlamaCppTarget`: chains, if drafted and plain steps give the same bits."""
        self.info = replace(self.info, capabilities=frozenset({CHAIN, LOGITS, TOP_K}))
        try:
            wrong = selftest.differing_bits(self, STEP_ROWS)
        except LeapaheadError as error:
            raise Refused(
                f"{self.info.name} cannot be decoded in exact mode ({first_line(error)}); leave out exact"
            ) from error
        if wrong:
            raise Refused(
                f"{self.info.name} cannot be decoded in exact mode (the logits of {wrong} drafted tokens are not those "
                "of plain decoding bit for bit with this build of llama.cpp); leave out exact"
            )
        return self.info.capabilities

    def open(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        capture: Capture = NOTHING,
        reserve: int = 0,
        owner: str = "",
    ) -> LlamaCppSession:
        session = super().open(tokens, params, capture, reserve, owner)
        session.chunked = len(session.tokens) - 1
        return session

    def fork(self, session: LlamaCppSession, params: SamplingParams) -> LlamaCppSession:
        twin = super().fork(session, params)
        twin.chunked = session.chunked
        return twin

    def release(self, session: LlamaCppSession) -> None:
        """Ends a session; the cells of whole chunks of its prompt stay for a prompt that begins with it."""
        track = session.track
        if session in self._sessions and self.context.alive:
            self._cells.discard_tree(track)
            track.length = min(track.length, session.chunked) // CHUNK * CHUNK
            self.context.remove(track.main, track.length)
            track.shared = min(track.shared, track.length)
        super().release(session)

    def _chunk_end(self, start: int, max_tokens: int) -> int:
        return (start // CHUNK + 1) * CHUNK

    def step(
        self,
        sessions: Sequence[LlamaCppSession],
        trees: Sequence[TokenTree],
        num_computed: Sequence[int] | None = None,
        capture: Capture = NOTHING,
    ) -> list[Choices]:
        self._check(capture)
        found = []
        for index, (session, tree) in enumerate(zip(sessions, trees, strict=True)):
            check_step([tree], len(tree), STEP_ROWS, self.chains_only, fixed=True)
            self._cells.discard_tree(session.track)
            self._cells.make_room(STEP_ROWS, f"a step of {STEP_ROWS} nodes")
            outputs = self._forward([session], [tree], [True] * len(tree), [0], capture)
            first = num_computed[index] if num_computed else 0
            assert outputs.logits is not None
            logits = np.array(outputs.logits[first : len(tree)])  # the next session's forward overwrites them
            found.append(Choices(logits, tree, session.sampler, num_computed=first))
        return found

    def _forward(
        self,
        sessions: Sequence[LlamaCppSession],
        trees: Sequence[TokenTree],
        wanted: Sequence[bool],
        num_computed: Sequence[int],
        capture: Capture,
    ) -> Outputs:
        """ONE forward over one chain, padded: as a step if it may be one and outputs are wanted, else as a chunk."""
        (tree,) = trees
        is_step = len(tree) <= STEP_ROWS and all(wanted) and sessions[0].is_read
        size = STEP_ROWS if is_step else CHUNK
        padding = size - len(tree)
        padded = TokenTree.chain(tree.token_list[0], [*tree.token_list[1:], *[PADDING] * padding])
        # The output layer computes the rows that are wanted: of a step all of them.
        return super()._forward(sessions, [padded], [*wanted, *[is_step] * padding], [0], capture)
