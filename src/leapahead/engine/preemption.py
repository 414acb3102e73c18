"""Which requests have a part of the KV cache: as many as it has room for now, not at their greatest lengths.

    admitted      where there is room for its prompt, and for some tokens more of it and of every open request
    preempted     the youngest, when a forward finds the cache full: its session is closed, and keeps tokens and sampler
    reopened      oldest first and before any new request, with twice as much room: its text is read again

So the oldest request always goes on, and one that is reopened takes nothing from others. A request is preempted
a few times at most, since the room that it waits for doubles, up to all that it may need. The forward that found the
cache full has changed no session; the next step repeats it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TypeGuard

from leapahead.core.errors import CacheFull
from leapahead.engine.loop import Running
from leapahead.engine.request import Handle
from leapahead.engine.turn import Turn, of_request
from leapahead.models.base import Target
from leapahead.models.reopening import Reopens

SHARE = 16  # a request is admitted with room for this part of the cache beyond its text


def reopens(target: Target) -> TypeGuard[Reopens]:
    """Whether requests of this target are preempted.

    An exact target would read the text as a prompt, which gives other bits, and an encoder's output is not kept.
    """
    info = target.info
    return isinstance(target, Reopens) and info.cache_tokens > 0 and not info.exact and info.decoder is None


class Preemption:
    """The requests that were preempted, and how much of the cache is kept free for the others.

    Args:
        target: whose cache it is. Of one that does not reopen sessions, all that a request may need is kept free.
        queue: of requests that have no session.
        turn: of the engine; the queue is changed while its `changed` is held.

    Attributes:
        waiting: the requests that were preempted.
        count: how often one was.
    """

    def __init__(self, target: Target, queue: deque[Handle], turn: Turn) -> None:
        self.waiting, self.count = list[Running](), 0
        self._queue, self._turn = queue, turn
        self._target = target if reopens(target) else None
        self._margin = target.info.cache_tokens // SHARE + 1

    def reserve(self, handle: Handle, length: int) -> int:
        """The length up to which room is kept for a request that has so many tokens now."""
        longest = handle.request.longest
        return longest if self._target is None else min(longest, length + (self._margin << handle.stats.preemptions))

    def keep_room(self, active: Sequence[Running]) -> None:
        """To be called before a session is opened: the room that is kept for the open ones follows their lengths."""
        for running in active:
            if self._target is not None:
                length = self.reserve(running.handle, len(running.session.tokens))
                self._target.reserve(running.session, length)

    def failed(self, error: BaseException, active: list[Running], *concerned: Running) -> None:
        """To be called with what a forward has raised: it ends these, unless there is room without the youngest."""
        if not (isinstance(error, CacheFull) and self._preempt(active)):
            for running in concerned:
                running.error = of_request(error, running.error)

    def reopen(self, active: list[Running], most: int) -> bool:
        """Opens those again that were preempted, unless nobody reads their text, while fewer than `most` are running.

        Returns:
            Whether there was room for all, so that others may be admitted.
        """
        self._turn.stalled = False
        for running in sorted(self.waiting, key=lambda each: each.handle.opened):
            if running in active:  # an interrupt came before it was closed, or after it was opened
                self.waiting.remove(running)
            elif running.handle.tokens and not (running.handle.paused or running.finished):
                if sum(not each.handle.paused for each in active) >= most:
                    return False
                try:
                    self._open(running, active)
                except CacheFull as error:
                    if active:
                        self.stuck(running.handle, active)
                    else:
                        running.error = error
                    return False
                except BaseException as error:
                    running.error = of_request(error)
            elif not running.handle.tokens:
                self._begin_anew(running)
        return True

    def stuck(self, handle: Handle, active: list[Running]) -> list[Handle]:
        """Which of this request, for which there is no room, and those behind it can never have some.

        They wait for streams that nobody reads before they are over. Such a stream is preempted, if that is possible.
        """
        self._turn.stalled = all(each.handle.paused for each in active)
        behind = [*(each.handle for each in self.waiting), *self._queue] if active and self._turn.stalled else []
        some = dict.fromkeys((handle, *behind))
        found = [each for each in some if all(running.handle.blocks(each) for running in active)]
        if found and self._preempt(active, least=1):
            self._turn.stalled, found = False, []
        return found

    def _preempt(self, active: list[Running], least: int = 2) -> bool:
        """Closes the session of the youngest, if so many are open. An interrupt leaves it in both lists, or closed."""
        able = [running for running in active if not running.finished]
        if self._target is None or len(able) < least:
            return False
        youngest = max(able, key=lambda each: each.handle.opened)
        self.waiting.append(youngest)
        active.remove(youngest)
        youngest.session.close()
        youngest.stats.preemptions += 1
        self.count += 1
        return True

    def _open(self, running: Running, active: list[Running]) -> None:
        assert self._target is not None
        session = running.session
        self.keep_room(active)
        session.close()  # again, if an interrupt came before
        reserve = self.reserve(running.handle, len(session.tokens))
        self._target.reopen(session, reserve, running.handle.request.owner)
        active.append(running)
        self.waiting.remove(running)

    def _begin_anew(self, running: Running) -> None:
        """Queues a request that has no text yet, before all others: its drafter is shown the prompt again."""
        running.ended = True  # the drafter learns nothing from it
        running.close()
        with self._turn.changed:
            self._queue.appendleft(running.handle)
        self.waiting.remove(running)
