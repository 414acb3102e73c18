"""One step of decoding. Plain decoding is the tree with a root only; there is no second loop.

    trees    = drafter.propose(sequences, budgets)   candidate continuations
    choices  = target.step(sessions, trees)          the target's own next token after EVERY node, in one forward
    verdict  = verify(tree, choices)                 walk from the root while a child equals the chosen token
    session.commit(verdict)                          keep the path's cache entries, discard the rest
    drafter.observe(sequences, steps)                pools, windows, automata learn from the step

An exception that concerns one sequence (a user's criterion or processor, non-finite logits, a drafter) is recorded in
it and ends that sequence alone. Queues and threads are the scheduler's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from time import perf_counter

from leapahead.core.errors import BadLogits, DraftError, LeapaheadError
from leapahead.core.relaxed import verify_relaxed
from leapahead.core.stats import Stats
from leapahead.core.stop import Stopper
from leapahead.core.text import Detokenizer, Tokenizer
from leapahead.core.tree import UNLIMITED, Budget, TokenTree
from leapahead.core.verify import Verdict, checked_verdict, verify
from leapahead.drafters.base import Drafter
from leapahead.engine.output import Output, TokenLogprobs
from leapahead.engine.request import Handle
from leapahead.engine.turn import of_request
from leapahead.models.base import CHAIN, TREE, Capture, Cost, KeepsPrefixes, ReadsInSteps, Session, Target
from leapahead.models.choices import Choices, PromptRows
from leapahead.models.embeddings import AddsEmbeddings
from leapahead.planner.draft import Forward, Proposal, SequenceView, Step


class Clock:
    """Charges the time since the last charge to a phase of `Stats.seconds`.

    Args:
        now: gives the time in seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.last = now()

    def charge(self, phase: str, stats: Stats, choose: float = 0.0) -> None:
        """Charges one sequence. Of the seconds since the last charge, `choose` are charged to that phase."""
        last, self.last = self.last, self._now()
        stats.seconds[phase] += self.last - last - choose
        stats.seconds["choose"] += choose

    def share(self, phase: str, batch: Sequence[Running], part: float = 1.0) -> float:
        """Charges several sequences with equal shares of `part` of the seconds since the last charge. Returns these."""
        last, self.last = self.last, self._now()
        for running in batch:
            running.stats.seconds[phase] += part * (self.last - last) / len(batch)
        return self.last - last


class Running:
    """A request with a session: its text in the making.

    Args:
        target: that decodes it.
        session: of that target.
        handle: where its outputs go.
        tokenizer: for stop strings.

    Attributes:
        capture: what its steps read of a forward beside the choices.
        error: what ends it, once something has failed.
        ended: whether the drafter was told that its text is over.
    """

    def __init__(self, target: Target, session: Session, handle: Handle, tokenizer: Tokenizer | None = None) -> None:
        self.target, self.session, self.handle = target, session, handle
        request = handle.request
        self.drafter, self.stats, self.capture = request.drafter, handle.stats, request.drafter.capture
        if request.logprobs is not None or request.acceptance is not None:
            self.capture |= Capture(logits=True)
        decoder, given = target.info.decoder, (request.drafter_cache, request.prediction, request.owner)
        source = request.tokens if decoder is not None else ()
        self.view = SequenceView(session.sampler, *given, source, not (decoder and decoder.source_vocab_size))
        text = Detokenizer(tokenizer, before=session.tokens).add if tokenizer is not None else None
        cached = target.info.cache_tokens or UNLIMITED
        longest = min(target.info.context_length, cached + 1)  # the last token of a text needs no room in the KV cache
        self.stopper = Stopper(request.stop, session.tokens, longest, text, self._complete())
        self.error: BaseException | None = None
        self.ended = False

    def _complete(self) -> Callable[[Sequence[int]], bool] | None:
        """Whether the grammar, if there is one, allows nothing after these tokens, which follow the committed ones."""
        grammar, tokens = self.view.grammar, self.session.tokens
        return None if grammar is None else lambda new: grammar.ended(len(tokens), new)

    def begin(self, rows: Sequence[PromptRows]) -> None:
        """Shows the drafter the sequence, and those captured rows of its prompt that were read before.

        What it raises ends the request. An interrupt ends this attempt alone, whose session is closed.
        """
        try:
            self.drafter.begin(self.view)
            for some in rows:
                self.show_prompt(some)
        except Exception as error:
            self.error = error
        except BaseException:
            self.error = LeapaheadError("decoding was interrupted while this request began")
            self.close()
            raise

    @property
    def finished(self) -> bool:
        return self.stopper.finish_reason is not None or self.error is not None

    @property
    def reading(self) -> bool:
        """Whether a part of its prompt is still to be read, or of its text again, whose entries an interrupt has cost:
        perhaps one in a step of other sequences, which moves entries too."""
        return self.session.unread > 0

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
                or the target takes no drafts, or does not know its probes.
        """
        name = self.drafter.name
        if not isinstance(proposal, Proposal):
            raise DraftError(f"drafter {name!r} proposed {proposal!r}; propose must return a Proposal")
        tree, root = proposal.tree, self.view.root
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
        if CHAIN not in self.target.info.capabilities:
            raise DraftError(
                f"drafter {name!r} drafted for {self.target.info.name}, which takes no drafts; declare its needs, as "
                "needs = frozenset({'chain'}), and use drafter='plain'"
            )
        if not budget.allows(tree):
            is_branched = budget.leaves == 1 < tree.num_leaves
            paths = f"; this step of {self.target.info.name} takes drafts of one path only" * is_branched
            raise DraftError(f"drafter {name!r} drafted beyond its budget of {budget}{paths}")
        return proposal

    def read_prompt(self, max_tokens: int) -> PromptRows | None:
        """Reads one chunk of the prompt; returns its captured rows."""
        began = perf_counter()
        rows = self.target.prefill(self.session, max_tokens)
        if rows is not None:
            rows.layers = self.capture.hidden
        self.show_prompt(rows)
        self.stats.prefill_forwards += 1
        self.stats.prefill_seconds += perf_counter() - began
        return rows

    def show_prompt(self, rows: PromptRows | None) -> None:
        """Gives the captured rows of a chunk to the drafter."""
        if rows is not None:
            self.drafter.read_prompt(self.view, rows)

    def advance(self, proposal: Proposal, choices: Choices, clock: Clock, forward: Forward) -> Output:
        """Verify, stop, commit, observe, count."""
        request = self.handle.request
        if request.on_choices is not None:
            request.on_choices(proposal, choices)
        position = len(self.session.tokens) - 1
        verdict = self.stopper.cut(self._verdict(proposal, choices))
        if min(verdict.tokens) < 0:  # after the cut: EOS needs no successor
            choices.check(verdict.path[-1])
        logprobs = () if request.logprobs is None else self._logprobs(verdict, choices, request.logprobs)
        clock.charge("verify", self.stats, choose=choices.seconds_since())
        self.stats.replayed += self.view.replay
        self.session.commit(verdict)
        self.view.replay = self.session.replay
        clock.charge("commit", self.stats)
        forward.committed.append(len(verdict.tokens))
        step = Step(proposal, choices, verdict, position, forward)
        if not self.finished:
            self.drafter.observe([self.view], [step])
        self._count(step)
        clock.charge("observe", self.stats, choose=choices.seconds_since())
        if request.on_step is not None:
            request.on_step(step)
        return Output(verdict.tokens, verdict.accepted, self.stopper.finish_reason, self.stopper.stop_reason, logprobs)

    def _verdict(self, proposal: Proposal, choices: Choices) -> Verdict:
        """By exact matching, unless the request has a relaxed rule or the drafter one of its own."""
        if proposal.judge is not None:
            judged = proposal.judge(choices)
            if (verdict := checked_verdict(judged, proposal.tree, self.view.vocab_size)) is None:
                raise DraftError(
                    f"drafter {self.drafter.name!r} judged its draft by {judged!r}, which is no path of it"
                )
            return verdict
        rule = self.handle.request.acceptance
        if rule is None or len(proposal.tree) == 1:
            return verify(proposal.tree, choices)
        return verify_relaxed(proposal.tree, choices, choices.log_distribution, rule)

    @staticmethod
    def _logprobs(verdict: Verdict, choices: Choices, k: int) -> tuple[TokenLogprobs, ...]:
        chosen, tokens, values = choices.log_probabilities(verdict.path, verdict.tokens, k)
        return tuple(
            TokenLogprobs(token, float(logprob), tuple(zip(some.tolist(), theirs.tolist(), strict=True)))
            for token, logprob, some, theirs in zip(verdict.tokens, chosen, tokens, values, strict=True)
        )

    def _count(self, step: Step) -> None:
        stats, tree, verdict, size = self.stats, step.tree, step.verdict, len(step.tree)
        stats.steps += 1
        stats.committed += len(verdict.tokens)
        stats.nodes += size
        if size == 1:
            return
        sources = step.proposal.sources or (self.drafter.name,) * size
        stats.drafted += size - 1
        stats.accepted += verdict.accepted
        stats.drafted_by.update(sources[1:])
        nodes = verdict.path
        if len(nodes) == verdict.accepted:  # the text ends at a drafted token, whose node was cut from the path
            nodes += (tree.child(nodes[-1], verdict.tokens[-1]) or 0,)
        for depth in range(1, verdict.accepted + 1):
            stats.accepted_by[sources[nodes[depth]]] += 1
            stats.accepted_at[depth] += 1

    def close(self) -> None:
        """Ends the text: the drafter keeps what it teaches, the cache rows are released. Again after an interrupt."""
        try:
            if not self.ended:
                self.ended = True
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
                if isinstance(self.error, BadLogits) and isinstance(self.target, KeepsPrefixes):
                    self.target.forget()  # entries that are NaN; even a masked one makes NaN of another text


def step(
    target: Target,
    batch: Sequence[Running],
    now: Callable[[], float] = perf_counter,
    reads: Mapping[Running, int] | None = None,
) -> list[tuple[Running, Output]]:
    """ONE forward for the whole batch. A sequence that fails has its `error` set and gives no output.

    Args:
        target: that runs it.
        batch: its sequences.
        now: gives the time in seconds.
        reads: of sequences of the batch whose prompts are not read: how many tokens of them the forward may read. For
            a target that `ReadsInSteps`.

    Raises:
        Exception: what the forward itself raises; it concerns all sequences, whose sessions are as before.
    """
    clock, reads = Clock(now), reads or {}
    later = [running for running, most in reads.items() if most < running.session.unread]  # their prompts go on
    proposals = propose(target, [running for running in batch if running not in later], clock, reads)
    proposals |= {running: Proposal(TokenTree.root(running.view.root)) for running in later}
    batch = [running for running in batch if running in proposals]
    if not batch:
        return []
    trees = [proposals[running].tree for running in batch]
    sessions = [running.session for running in batch]
    capture = _union([running.capture for running in batch])
    cost = target.cost(sessions, trees)
    clock.share("draft", batch)
    if reads and isinstance(target, ReadsInSteps):
        unread = [session.unread for session in sessions]
        choices = target.step_and_read(sessions, trees, [reads.get(running, 0) for running in batch], capture)
        forward = _share(clock, batch, choices, unread, cost)
    else:
        choices = target.step(sessions, trees, capture=capture)
        forward = Forward(clock.share("forward", batch), cost, choices[0].prepares, sum(map(len, trees)) - len(batch))
    outputs = []
    try:
        for running, chosen in zip(batch, choices, strict=True):
            chosen.layers = capture.hidden
            try:
                running.show_prompt(chosen.prompt)
                if not chosen.took_part:
                    continue
                output = running.advance(proposals[running], chosen, clock, forward)
                running.handle.add(output)  # at once: an interrupt in the next sequence does not lose it
                outputs.append((running, output))
            except Exception as error:
                running.error = error
            except BaseException as error:  # interrupted, perhaps between two changes of the session
                running.error = LeapaheadError(f"decoding was interrupted by {error!r} in a step of this request")
                of_request(error)
    finally:  # of all together: a thread that is woken takes the interpreter's lock from the other sequences
        for running, _ in outputs:
            running.handle.tell()
    return outputs


def _share(
    clock: Clock, batch: Sequence[Running], choices: Sequence[Choices], unread: Sequence[int], cost: Cost
) -> Forward:
    """Charges a forward that read prompts too: the prompts by their tokens, what remains to those that took part.

    Args:
        unread: tokens of each prompt that were unread before.
    """
    decoded = [running for running, chosen in zip(batch, choices, strict=True) if chosen.took_part]
    read = [
        before if before and chosen.took_part else before - running.session.unread
        for running, chosen, before in zip(batch, choices, unread, strict=True)
    ]
    rows = sum(read) + cost.rows
    seconds = clock.share("forward", decoded, cost.rows / rows)
    for running, tokens in zip(batch, read, strict=True):
        if tokens:
            running.stats.prefill_forwards += 1
            running.stats.prefill_seconds += seconds * tokens / rows
    return Forward(seconds, replace(cost, read=sum(read)))


def _union(captures: Sequence[Capture]) -> Capture:
    """What serves all of them; usually they are one object."""
    found = captures[0]
    for capture in captures:
        if capture is not found:
            found |= capture
    return found


def propose(
    target: Target, batch: Sequence[Running], clock: Clock, reads: Mapping[Running, int]
) -> dict[Running, Proposal]:
    """A draft for each sequence, which ends where the text must end. Those of one drafter are drafted together.

    Args:
        reads: see `step`; so many nodes fewer are drafted.
    """
    found: dict[Running, Proposal] = {}
    groups: dict[Drafter, list[tuple[Running, Budget]]] = {}
    most, info = target.max_nodes - 1, target.info
    # What replays can be given the paths of one tree as a batch; see `models.base.BRANCHES`.
    leaves = target.max_leaves if TREE in info.capabilities or (info.replays and len(batch) == 1) else 1
    for running in batch:
        nodes, depth = most - reads.get(running, 0), running.stopper.room - 1
        if (nodes <= 0 or depth == 0) and not running.drafter.decides:
            found[running] = Proposal(TokenTree.root(running.view.root))
        else:
            groups.setdefault(running.drafter, []).append((running, Budget(max(nodes, 0), depth, leaves)))
    for drafter, members in groups.items():
        found.update(_propose(drafter, members))
        clock.share("draft", [running for running, _ in members])
    return found


def _propose(drafter: Drafter, members: list[tuple[Running, Budget]]) -> dict[Running, Proposal]:
    """The drafts of one drafter. Where the batch fails, each sequence is tried alone, so that only the cause fails."""
    try:
        proposals = drafter.propose([running.view for running, _ in members], [budget for _, budget in members])
        if not isinstance(proposals, Sequence) or len(proposals) != len(members):
            raise DraftError(
                f"drafter {drafter.name!r} proposed {proposals!r} for {len(members)} sequences; propose must return a "
                "list with one Proposal for each"
            )
        return {
            running: running.checked(proposal, budget)
            for (running, budget), proposal in zip(members, proposals, strict=True)
        }
    except BaseException as error:
        ended = of_request(error)
        if len(members) == 1:
            members[0][0].error = ended
            return {}
    return {running: proposal for each in members for running, proposal in _propose(drafter, [each]).items()}
