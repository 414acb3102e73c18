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

from leapahead.core.errors import DraftError
from leapahead.core.tree import Budget, TokenTree
from leapahead.drafters.base import Drafter, SequenceErrors
from leapahead.engine.clock import Clock
from leapahead.engine.output import Output
from leapahead.engine.running import Running, interrupted
from leapahead.models.base import Capture, Cost, ReadsInSteps, Target
from leapahead.models.choices import Choices
from leapahead.planner.draft import Forward, Proposal, Step

Done = tuple[Running, Step, Output]  # a sequence with the step that it has committed


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
    proposals = propose(target, [running for running in batch if running not in later], reads)
    proposals |= {running: Proposal(TokenTree.root(running.view.root)) for running in later}
    batch = [running for running in batch if running in proposals]
    if not batch:
        return []
    drafts = [proposals[running] for running in batch]
    trees = [proposal.tree for proposal in drafts]
    sessions = [running.session for running in batch]
    capture = _union([running.capture for running in batch])
    cost = target.cost(sessions, trees)
    clock.charge("draft")
    if reads and isinstance(target, ReadsInSteps):
        unread = [session.unread for session in sessions]
        choices = target.step_and_read(sessions, trees, [reads.get(running, 0) for running in batch], capture)
        forward = _shared(clock, batch, choices, unread, cost)
        for running, chosen in zip(batch, choices, strict=True):
            if running.reading:
                running.alone(running.show_prompt, chosen.prompt)
                running.reading = not chosen.took_part and running.session.unread > 0
    else:
        choices = target.step(sessions, trees, capture=capture)
        forward = Forward(clock.charge("forward"), cost)
    for chosen in choices if capture.hidden else ():
        chosen.layers = capture.hidden
    done: list[Done] = []
    try:
        _commit(batch, drafts, choices, forward, clock, done)
        _observe(done)
        clock.charge("observe", choose=sum([chosen.seconds_since() for chosen in choices]))
        clock.settle([running.stats for running, _, _ in done])
        for running, step, _ in done:
            if (on_step := running.handle.request.on_step) is not None and running.error is None:
                running.alone(on_step, step)
    finally:  # whatever was interrupted: what the others have committed belongs to their texts
        outputs = [(running, output) for running, _, output in done if running.error is None]
        for running, output in outputs:
            running.handle.add(output)
        for running, _ in outputs:  # of all together: a thread that is woken takes the interpreter's lock from the rest
            running.handle.tell()
    return outputs


def _commit(
    batch: Sequence[Running],
    drafts: Sequence[Proposal],
    choices: Sequence[Choices],
    forward: Forward,
    clock: Clock,
    done: list[Done],
) -> None:
    """Verifies the drafts, and then commits what was accepted; adds each sequence to `done` when it is committed."""
    verdicts = []
    for running, proposal, chosen in zip(batch, drafts, choices, strict=True):
        is_stepped = chosen.took_part and running.error is None
        verdicts.append(running.alone(running.verify, proposal, chosen) if is_stepped else None)
    clock.charge("verify", choose=sum([chosen.seconds_since() for chosen in choices]))
    for running, proposal, chosen, verdict in zip(batch, drafts, choices, verdicts, strict=True):
        if verdict is not None and (found := running.alone(running.commit, proposal, chosen, verdict, forward)):
            done.append((running, *found))
    clock.charge("commit")


def _observe(done: Sequence[Done]) -> None:
    """Shows the drafters the steps of the texts that go on, of each drafter all together."""
    groups: dict[Drafter, list[tuple[Running, Step]]] = {}
    for running, step, _ in done:
        if not running.finished:
            groups.setdefault(running.drafter, []).append((running, step))
    for drafter, members in groups.items():
        failed: BaseException | None = None
        try:
            drafter.observe([running.view for running, _ in members], [step for _, step in members])
        except SequenceErrors as found:
            for index, error in found.errors.items():
                members[index][0].error = error
        except Exception as error:
            failed = error
        except BaseException:
            failed = interrupted()
            raise
        finally:
            if failed is not None:
                for running, _ in members:
                    running.error = failed


def _shared(
    clock: Clock, batch: Sequence[Running], choices: Sequence[Choices], unread: Sequence[int], cost: Cost
) -> Forward:
    """Charges a forward that read prompts too: the prompts by their tokens, what remains to those that took part.

    Args:
        unread: tokens of each prompt that were unread before.
    """
    read = [
        before if before and chosen.took_part else before - running.session.unread
        for running, chosen, before in zip(batch, choices, unread, strict=True)
    ]
    rows = sum(read) + cost.rows
    seconds = clock.charge("forward", part=cost.rows / rows)
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


def propose(target: Target, batch: Sequence[Running], reads: Mapping[Running, int]) -> dict[Running, Proposal]:
    """A draft for each sequence, which ends where the text must end. Those of one drafter are drafted together.

    Args:
        reads: see `step`; so many nodes fewer are drafted.
    """
    found: dict[Running, Proposal] = {}
    groups: dict[Drafter, list[tuple[Running, Budget]]] = {}
    most, leaves = target.max_nodes - 1, target.max_leaves
    for running in batch:
        nodes, depth = most - reads.get(running, 0), running.stopper.room - 1
        if nodes <= 0 or depth == 0:
            found[running] = Proposal(TokenTree.root(running.view.root))
        else:
            groups.setdefault(running.drafter, []).append((running, Budget(nodes, depth, leaves)))
    for drafter, members in groups.items():
        found.update(_propose(drafter, members))
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
    except Exception as error:
        if len(members) == 1:
            members[0][0].error = error
            return {}
    return {running: proposal for each in members for running, proposal in _propose(drafter, [each]).items()}
