"""The sequence ids and cells of one KV cache, divided among the tracks of all sequences.

A closed sequence leaves an idle track behind: its cells stay for a prompt that begins with the same tokens, until they
or its id are needed. Attention goes over all cells, those of idle tracks too. So idle tracks that the next sequence
does not take over leave the cells when it is opened, and are kept in the machine's memory, see `kept`. Where they
cannot be, as many stay as sequences were open at once, and at least `LEAST_IDLE`. A forked track owns the same cells as
the one that it was forked from. So that a cell is counted once, every track may have a parent, with which its first
`shared` cells are counted:

    cells taken  =  sum over tracks of (cells - shared)         an open track's parent is open

A recurrent state cannot be cut to a shorter beginning: an idle track of one serves prompts that begin with all of its
tokens. So the state behind a prompt is kept beside the one at the end of its text, while there is an id for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from weakref import proxy

from leapahead.core.errors import CacheFull
from leapahead.models.llama_cpp.context import Context
from leapahead.models.llama_cpp.kept import KeptTexts
from leapahead.models.llama_cpp.options import MOST_SEQUENCES
from leapahead.models.llama_cpp.state_track import StateTrack
from leapahead.models.llama_cpp.track import NewId, Track
from leapahead.models.prefix import common_prefix

LEAST_IDLE = 4


class Cells:
    """The tracks of a context.

    Attributes:
        open: those of open sequences.
        whole: cells are taken over in multiples of so many.
        texts: earlier texts, in the machine's memory.

    Args:
        context: that they are in.
        most_tokens: of the texts in the machine's memory.
    """

    def __init__(self, context: Context, most_tokens: int) -> None:
        self.context, self.texts = context, KeptTexts(context, most_tokens)
        self.open: list[Track] = []
        self.whole = 1
        self._most_open = 1  # at once
        self._clears = False  # when no track is open
        self._idle: list[tuple[Track, list[int]]] = []  # with their tokens, least recently used first
        self._free = list(range(context.n_seq_max))
        self._track = StateTrack if context.model.stateful else Track
        cells = proxy(self)  # a reference of each track would keep the model in a cycle
        self._spare_id: NewId = lambda track: cells._take(track, max)

    @property
    def taken(self) -> int:
        """Cells of open tracks."""
        return sum(track.cells - track.shared for track in self.open)

    @property
    def room(self) -> int:
        """Cells that the next trees of all open sequences may take; states take none."""
        if not self.context.model.cells:
            return self.context.n_ctx
        return self.context.n_ctx - sum(max(track.length, track.prompt) - track.shared for track in self.open)

    @property
    def kept(self) -> int:
        """Cells of idle tracks."""
        return sum(track.cells - track.shared for track, _ in self._idle)

    @property
    def _leave(self) -> bool:
        """Whether idle tracks leave the cells when a sequence is opened."""
        return self.texts.able and not self.context.model.stateful

    def acquire(self, tokens: Sequence[int], reserve: int, reuse: int, owner: str = "") -> Track:
        """A track for a prompt.

        Args:
            tokens: of the prompt that its cells are to hold.
            reserve: the number of cells that the sequence may grow to.
            reuse: greatest number of tokens whose cells may be taken over from an idle track with the same beginning.
            owner: see `Target.open`.

        Raises:
            CacheFull: no id, or not enough cells.
        """
        track = self._with_prefix(tokens[:reuse], owner) or self._track(self.context, self._spare_id, self._new_id())
        while self._idle and self._leave:
            self._put_away()
        track.owner = owner
        track.prompt, track.reserve = len(tokens), max(min(reserve, self.context.longest), len(tokens) + 1)
        try:
            self._reserve(track, f"a prompt of {len(tokens) + 1} tokens")
        except CacheFull:
            track.prompt = 0
            self._put_back(track, list(tokens[: track.length]))
            raise
        self.open.append(track)
        self._most_open = max(self._most_open, len(self.open))
        return track

    def reclaim(self, used: Collection[Track]) -> None:
        """Frees what an interrupted call has left behind: open tracks that are not used, and ids without a track."""
        self.open = [track for track in self.open if track in used]
        tracks = [*self.open, *(idle for idle, _ in self._idle)]
        for track in tracks:
            if track.parent not in tracks:
                track.parent, track.shared = None, 0
        known = {each for track in tracks for each in (track.main, *track.copies)}
        for lost in sorted(set(range(self.context.n_seq_max)) - known - set(self._free)):
            self.context.remove(lost)
            self._free.append(lost)

    def fork(self, track: Track) -> Track:
        """A second track over the cells of an open one, whose tree has been committed.

        Raises:
            CacheFull: no id, or not enough cells for what may follow.
        """
        twin = self._twin(track)
        twin.reserve = max(track.reserve, track.length + 1)
        try:
            self._reserve(twin, f"another sample of {track.length + 1} tokens")
        except CacheFull:
            self._free.append(twin.main)
            raise
        self.context.copy(track.main, twin.main)
        self.open.append(twin)
        return twin

    def keep(self, track: Track, tokens: list[int]) -> None:
        """Keeps the state of an open track, which has read just these tokens, for prompts that begin with them."""
        same = (at for at, (each, theirs) in enumerate(self._idle) if theirs == tokens and each.owner == track.owner)
        known = next(same, None)
        if known is not None:
            self._idle.append(self._idle.pop(known))
        elif self._free or self._idle:
            self._idle.append((self._copy(track), tokens))

    def _copy(self, track: Track) -> Track:
        """A track that owns the same cells."""
        twin = self._twin(track)
        self.context.copy(track.main, twin.main)
        return twin

    def _twin(self, track: Track) -> Track:
        """A track for the same tokens, which owns no cells yet."""
        twin = self._track(self.context, self._spare_id, self._new_id(track))
        twin.length = twin.shared = track.length
        twin.parent, twin.top_k, twin.owner = track, track.top_k, track.owner
        return twin

    def release(self, track: Track, tokens: Sequence[int], keep: bool) -> None:
        """Ends an open track.

        Args:
            tokens: of its sequence, all that it has cells of.
            keep: whether the cells stay for prompts to come.
        """
        self.open.remove(track)
        if (track.tree is not None or track.copies) and not track.discard_tree():  # a step may not have got to its tree
            keep = False
        self._free += track.release_ids()
        track.prompt = track.reserve = 0
        if keep and track.length <= len(tokens):  # else a commit was interrupted
            self._put_back(track, list(tokens[: track.length]))
        else:
            self._discard(track)
        if self._clears and not self.open:
            self.forget()

    def discard_tree(self, track: Track) -> None:
        """Discards a tree that was not committed; a state that cannot forget it is emptied."""
        if track.tree is not None and not track.discard_tree():
            self.reset(track)

    def reset(self, track: Track) -> None:
        """Empties an open track whose state is lost."""
        self._hand_over(track)
        track.empty()

    def lose(self) -> None:
        """Empties all tracks: no state can be relied on."""
        self.forget()
        for track in self.open:
            self.reset(track)

    def forget(self) -> None:
        """Discards all idle tracks and kept texts, and clears the memory, at the latest when no track is open.

        What remained there, such as NaN, could get into later texts, although it is masked.
        """
        self.texts.forget()
        while self._idle:
            self._discard(self._idle.pop(0)[0])
        self._clears = bool(self.open)
        if not self._clears:
            self.context.clear()

    def make_room(self, need: int, what: str, reserved: int = 0) -> None:
        """Discards idle tracks for `need` cells more.

        Args:
            what: that needs them, for the message.
            reserved: cells that are kept free for open sequences.

        Raises:
            CacheFull: they do not fit beside the open tracks and what is reserved for them; nothing is lost.
        """
        if not self.context.model.cells:
            return
        n_ctx = self.context.n_ctx
        while self._idle and self.taken + self.kept + need > n_ctx:
            self._put_away()
        if self.taken + reserved + need > n_ctx:
            raise CacheFull(
                f"the KV cache of {n_ctx} cells is full: other sequences take {self.taken + reserved}, and {what} "
                f"needs {need}; close a sequence, or load the model with a larger n_ctx"
            )

    def _reserve(self, track: Track, what: str) -> None:
        """Makes room for a track that is to be opened, beside what is reserved for the open ones."""
        context = self.context
        drafting = max(1, context.n_seq_max // 2)  # sequences that can have a second id
        if context.shares_states and not context.saves_states and len(self.open) >= drafting:
            raise CacheFull(
                f"{self._are_open()}, and n_seq_max={context.n_seq_max} is for no more, since the state "
                "before a draft takes a sequence id too; close a sequence, or load the model with a larger n_seq_max"
            )
        reserved = sum(max(each.reserve - each.cells, 0) for each in self.open)
        self.make_room(min(track.reserve, self.context.n_ctx) - track.shared, what, reserved)

    def _new_id(self, wanting: Track | None = None) -> int:
        """A sequence id that is not in use, if need be one that a track other than the wanting holds for no tree.

        It is the lowest: llama.cpp computes recurrent states side by side where main ids follow one another.
        """
        return self._take(wanting, min)

    def _take(self, wanting: Track | None, choice: Callable[[list[int]], int]) -> int:
        if not self._free and self._idle:
            self._put_away()
        if not self._free:
            others = [track for track in self.open if track is not wanting]
            share = self.context.n_seq_max // (len(others) + 1)
            self._free += [each for track in others for each in track.release_ids(keep=share - 1)]
        if not self._free:
            raise CacheFull(
                f"{self._are_open()} and no sequence id of n_seq_max={self.context.n_seq_max} is left; "
                f"close a sequence, or load the model with a larger n_seq_max (at most {MOST_SEQUENCES})"
            )
        self._free.remove(found := choice(self._free))
        return found

    def _are_open(self) -> str:
        return f"{len(self.open)} sequence{' is' if len(self.open) == 1 else 's are'} open"

    def _with_prefix(self, tokens: Sequence[int], owner: str) -> Track | None:
        """A track of what the owner's earlier texts have in common with `tokens`, if one has something.

        It is the idle track that has most, cut to that, unless a text in the machine's memory has more. A state cannot
        be cut.
        """
        _, most = self._best_idle(tokens, owner)
        if (loaded := self._loaded(tokens, owner, most)) is not None:
            return loaded
        best, most = self._best_idle(tokens, owner)  # again: making room may have put tracks away
        if best < 0:
            return None
        stateful = self.context.model.stateful
        track, theirs = self._idle.pop(best)
        if stateful and (self._free or self._idle):  # it stays for others
            self._idle.append((track, theirs))
            track = self._copy(track)
        else:
            self._hand_over(track)
        track.length, track.shared = most, min(track.shared, most)  # before another track shares its cells in its place
        self._lead(track)
        if not stateful:
            self.context.remove(track.main, most)
        track.top_k = track.top_k and track.top_k.between(0, most)
        return track

    def _best_idle(self, tokens: Sequence[int], owner: str) -> tuple[int, int]:
        """Which of the owner's idle tracks has most in common with `tokens`, and how much; -1 for none."""
        best, most, stateful = -1, 0, self.context.model.stateful
        for index, (track, theirs) in enumerate(self._idle):
            common = common_prefix(theirs, list(tokens), len(tokens)) // self.whole * self.whole
            if common <= most or (stateful and common < len(theirs)) or track.owner != owner:
                continue
            if stateful or self.context.first_position(track.main) == 0:  # else a window has moved on
                best, most = index, common
        return best, most

    def _loaded(self, tokens: Sequence[int], owner: str, more_than: int) -> Track | None:
        """A track of what a text in the machine's memory has in common with `tokens`, if that is more."""
        text, common = self.texts.find(tokens, owner, more_than)
        if text is None:
            return None
        reserved = sum(max(each.reserve - each.cells, 0) for each in self.open)
        try:
            self.make_room(len(text.tokens), "an earlier text", reserved)
            main = self._new_id()
        except CacheFull:
            return None
        if not self.texts.load(text, main):
            self._free.append(main)
            return None
        if not self.context.model.stateful:
            self.context.remove(main, common)
        track = self._track(self.context, self._spare_id, main)
        track.length, track.owner = common, owner
        track.top_k = text.top_k and text.top_k.between(0, common)
        return track

    def _lead(self, track: Track) -> None:
        """Lets idle tracks be counted with this one, which is to be opened, instead of the other way round."""
        while (parent := track.parent) in [idle for idle, _ in self._idle]:
            assert parent is not None
            track.parent = parent.parent
            if parent.shared <= track.shared:
                parent.parent = track
                track.shared, parent.shared = parent.shared, track.shared

    def _put_back(self, track: Track, tokens: list[int]) -> None:
        """Makes a track idle."""
        if track.length == 0:
            self._discard(track)
            return
        self._hand_over(track)
        self._idle.append((track, tokens))
        if not self.context.model.stateful:
            while len(self._idle) > max(self._most_open, LEAST_IDLE):
                self._put_away()

    def _put_away(self) -> None:
        """Takes the idle track that was used least recently out of the cells, into the machine's memory."""
        track, tokens = self._idle.pop(0)
        self.texts.save(track.main, tokens, track.owner, track.top_k)
        self._discard(track)

    def _discard(self, track: Track) -> None:
        """Frees the cells of a track, but for those that others share, and its id."""
        self._hand_over(track)
        self.context.remove(track.main)
        self._free.append(track.main)

    def _hand_over(self, track: Track) -> None:
        """Makes one of the tracks that count cells with this one the parent of it and of the others."""
        children = [each for each in (*self.open, *(idle for idle, _ in self._idle)) if each.parent is track]
        if not children:
            return
        heir = max(children, key=lambda each: (each in self.open, each.shared))
        for child in children:
            child.parent, child.shared = heir, min(child.shared, heir.shared)
        heir.parent = track.parent
        if heir.shared >= track.shared:
            track.parent, track.shared, heir.shared = heir, heir.shared, track.shared
