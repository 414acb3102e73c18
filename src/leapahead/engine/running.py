"""A request with a session: what a step does with one sequence.

What it raises for the sequence alone is recorded in it. Forwards and batches are `engine.loop`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, TypeVar

from leapahead.core.errors import BadParameter, DraftError, LeapaheadError
from leapahead.core.relaxed import verify_relaxed
from leapahead.core.sampling import checked
from leapahead.core.stop import Stopper
from leapahead.core.text import Detokenizer, Tokenizer
from leapahead.core.tree import Budget
from leapahead.core.verify import Verdict, verify
from leapahead.engine.output import Output, TokenLogprobs
from leapahead.engine.request import Handle
from leapahead.models.base import Capture, ReadsInSteps, Session, Target
from leapahead.models.choices import Choices, PromptRows
from leapahead.models.embeddings import AddsEmbeddings
from leapahead.planner.draft import Forward, Proposal, SequenceView, Step

T = TypeVar("T")


class Running:
    """A request with a session: its text in the making.

    Args:
        target: that decodes it.
        session: of that target.
        handle: where its outputs go.
        tokenizer: for stop strings.

    Attributes:
        capture: what its steps read of a forward beside the choices.
        reading: whether a part of its prompt is still to be read.
        error: what ends it, once something has failed.
    """

    def __init__(self, target: Target, session: Session, handle: Handle, tokenizer: Tokenizer | None = None) -> None:
        self.target, self.session, self.handle = target, session, handle
        request = handle.request
        self.drafter, self.stats = request.drafter, handle.stats
        self.capture = self.drafter.capture
        if request.logprobs is not None or request.acceptance is not None:
            self.capture |= Capture(logits=True)
        source = request.tokens if target.info.decoder is not None else ()
        self.view = SequenceView(session.sampler, request.drafter_cache, request.prediction, request.owner, source)
        text = Detokenizer(tokenizer).add if tokenizer is not None else None
        self.stopper = Stopper(request.stop, session.tokens, target.info.context_length, text, self._complete())
        self.error: BaseException | None = None
        self.reading = session.unread > 0
        self._ending = False

    def _complete(self) -> Callable[[Sequence[int]], bool] | None:
        """Whether the grammar, if there is one, allows nothing after these tokens, which follow the committed ones."""
        grammar, tokens = self.view.grammar, self.session.tokens
        return None if grammar is None else lambda new: grammar.ended(len(tokens), new)

    def begin(self, rows: Sequence[PromptRows]) -> None:
        """Shows the drafter the sequence, and those captured rows of its prompt that were read before."""
        try:
            self.drafter.begin(self.view)
            for some in rows:
                self.show_prompt(some)
        except Exception as error:
            self.error = error
        except BaseException:
            self.error = LeapaheadError("decoding was interrupted while this request began")
            raise

    @property
    def finished(self) -> bool:
        return self.stopper.finish_reason is not None or self.error is not None

    @property
    def reads_in_step(self) -> bool:
        """Whether its prompt may be read in the forward of a step."""
        if self.capture.hidden or not isinstance(self.target, ReadsInSteps):
            return False
        return len(self.session.tokens) - self.session.unread < self.target.info.reads_in_steps

    def checked(self, proposal: Proposal, budget: Budget) -> Proposal:
        """The proposal, if the target may be given it.

        Raises:
            DraftError: it is none, stands over another root, has tokens outside the vocabulary, or exceeds the budget;
                or it has probes that the target does not know.
        """
        name, root = self.drafter.name, self.session.tokens[-1]
        if not isinstance(proposal, Proposal):
            raise DraftError(f"drafter {name!r} proposed {proposal!r}; propose must return a Proposal")
        tree = proposal.tree
        tokens = tree.token_list
        if tree.probes:
            known = self.target.embeddings() if isinstance(self.target, AddsEmbeddings) else range(0)
            if not all(token in known for probes in tree.probes for token in probes.tokens):
                raise DraftError(f"drafter {name!r} drafted probes whose embeddings were not added to the target")
        if tokens[0] != root:
            raise DraftError(f"drafter {name!r} drafted over token {tokens[0]}, not {root}")
        if len(tokens) == 1:
            return proposal
        if proposal.sources and len(proposal.sources) != len(tokens):
            raise DraftError(f"drafter {name!r} named {len(proposal.sources)} sources for {len(tokens)} nodes")
        if min(tokens) < 0 or max(tokens) >= self.view.vocab_size:
            raise DraftError(f"drafter {name!r} drafted a token outside the vocabulary of {self.view.vocab_size}")
        if not budget.allows(tree):
            raise DraftError(f"drafter {name!r} drafted beyond its budget of {budget}")
        return proposal

    def read_prompt(self, max_tokens: int) -> PromptRows | None:
        """Reads one chunk of the prompt; returns its captured rows."""
        began = perf_counter()
        rows = self.target.prefill(self.session, max_tokens)
        if rows is not None:
            rows.layers = self.capture.hidden
        self.reading = self.session.unread > 0
        self.show_prompt(rows)
        self.stats.prefill_forwards += 1
        self.stats.prefill_seconds += perf_counter() - began
        return rows

    def show_prompt(self, rows: PromptRows | None) -> None:
        """Gives the captured rows of a chunk to the drafter."""
        if rows is not None:
            self.drafter.read_prompt(self.view, rows)

    def verify(self, proposal: Proposal, choices: Choices) -> Verdict:
        """What the step would commit if the text did not end in it. Changes nothing.

        By exact matching, unless the request has a relaxed rule or the drafter one of its own.
        """
        request = self.handle.request
        if request.on_choices is not None:
            request.on_choices(proposal, choices)
        if proposal.judge is not None:
            return proposal.judge(choices)
        if request.acceptance is None or len(proposal.tree.token_list) == 1:
            return verify(proposal.tree, choices)
        return verify_relaxed(proposal.tree, choices, choices.log_distribution, request.acceptance)

    def commit(self, proposal: Proposal, choices: Choices, verdict: Verdict, forward: Forward) -> tuple[Step, Output]:
        """Stop, commit, count. The drafter observes the step afterwards, with all others of the forward."""
        session, stopper, k = self.session, self.stopper, self.handle.request.logprobs
        position = len(session.tokens) - 1
        verdict = stopper.cut(verdict)
        if min(verdict.tokens) < 0:  # after the cut: EOS needs no successor
            if self.view.grammar is not None and self.view.grammar.problem:
                raise BadParameter(self.view.grammar.problem)
            checked(verdict.tokens, f"position {position + len(verdict.tokens)}")
        logprobs = () if k is None else self._logprobs(verdict, choices, k)
        self.stats.replayed += self.view.replay
        session.commit(verdict)
        self.view.replay = session.replay
        step = Step(proposal, choices, verdict, position, forward)
        self._count(proposal, verdict)
        return step, Output(verdict.tokens, verdict.accepted, stopper.finish_reason, stopper.stop_reason, logprobs)

    @staticmethod
    def _logprobs(verdict: Verdict, choices: Choices, k: int) -> tuple[TokenLogprobs, ...]:
        chosen, tokens, values = choices.log_probabilities(verdict.path, verdict.tokens, k)
        return tuple(
            TokenLogprobs(token, float(logprob), tuple(zip(some.tolist(), theirs.tolist(), strict=True)))
            for token, logprob, some, theirs in zip(verdict.tokens, chosen, tokens, values, strict=True)
        )

    def _count(self, proposal: Proposal, verdict: Verdict) -> None:
        stats, tree, accepted = self.stats, proposal.tree, verdict.accepted
        size = len(tree.token_list)
        stats.steps += 1
        stats.committed += len(verdict.tokens)
        stats.nodes += size
        if size == 1:
            return
        sources = proposal.sources or (self.drafter.name,) * size
        stats.drafted += size - 1
        stats.drafted_by.update(sources[1:])
        if not accepted:
            return
        stats.accepted += accepted
        nodes = verdict.path
        if len(nodes) == accepted:  # the text ends at a drafted token, whose node was cut from the path
            nodes += (tree.child(nodes[-1], verdict.tokens[-1]) or 0,)
        for depth in range(1, accepted + 1):
            stats.accepted_by[sources[nodes[depth]]] += 1
            stats.accepted_at[depth] += 1

    def alone(self, action: Callable[..., T], *given: Any) -> T | None:
        """What an action gives that concerns this sequence alone. An exception ends it, and gives None."""
        try:
            return action(*given)
        except Exception as error:
            self.error = error
        except BaseException:  # perhaps between two changes of the session
            self.error = interrupted()
            raise
        return None

    def close(self) -> None:
        """Ends the text: the drafter keeps what it teaches, the cache rows are released. Again after an interrupt."""
        try:
            if not self._ending:
                self._ending = True
                if self.error is None:
                    self.drafter.finish(self.view)
                self.stats.drafter = self.drafter.figures(self.view)
        except Exception as error:  # a drafter of the user's
            self.error = self.error or error
        finally:
            try:
                self.drafter.close(self.view)
            except Exception as error:
                self.error = self.error or error
            finally:
                self.session.close()


def interrupted() -> LeapaheadError:
    """What ends a sequence whose step was interrupted."""
    return LeapaheadError("decoding was interrupted while a step of this request was committed")
