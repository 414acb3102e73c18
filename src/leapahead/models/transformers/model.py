"""Any causal language model of Transformers as a target, unpatched: tree attention over a KV cache of our own.

The model is called through its public interface, with a 4-D mask, `position_ids` and a `Cache`. Which of these it
supports is tested when the target is made, on the model itself (`selftest`); what fails is refused by name.

Knows neither drafters nor text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from threading import RLock
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from leapahead.core.errors import BadParameter, LeapaheadError, Refused
from leapahead.core.parameters import is_whole
from leapahead.core.sampling import Sampler, SamplingParams
from leapahead.core.tree import UNLIMITED, IntArray, TokenTree
from leapahead.core.verify import Verdict
from leapahead.models.base import (
    EMBEDDINGS,
    HIDDEN,
    NOTHING,
    PROMPT_ROWS,
    Capture,
    Cost,
    TargetInfo,
    checked_prompt,
    require,
)
from leapahead.models.captured import TopK, prompt_rows
from leapahead.models.choices import Choices, PromptRows, best
from leapahead.models.prompt_entries import PromptEntries
from leapahead.models.transformers import (
    changes,
    choosing,
    embeddings,
    entries,
    executors,
    families,
    require_version,
    selftest,
    weights,
)
from leapahead.models.transformers.exact import ExactExecutor
from leapahead.models.transformers.forward import CachedExecutor, CachedState, Executor, Layers, MaskedExecutor, State
from leapahead.models.transformers.memory import usual_tokens
from leapahead.models.transformers.modes import autocast, computing, forwards
from leapahead.models.transformers.replay import ReplayExecutor
from leapahead.models.transformers.static import choice
from leapahead.models.transformers.static.executor import StaticExecutor
from leapahead.models.transformers.static.graphs import GraphBackend
from leapahead.models.transformers.twin import twin

NODES = 512  # slots for the nodes of a step, behind a sequence that fills the context


class TransformersSession:
    """One sequence. The state holds every committed token but the last, which is the next root."""

    def __init__(self, tokens: list[int], state: State, sampler: Sampler, capture: Capture = NOTHING) -> None:
        self.tokens, self.state, self.sampler, self.capture = tokens, state, sampler, capture
        self.rows_given = 0  # positions of the prompt up to which captured rows were returned
        self.begin: PromptEntries | None = None  # the entries with which the prompt was opened

    @property
    def unread(self) -> int:
        return len(self.tokens) - 1 - self.state.length

    @property
    def replay(self) -> int:
        return self.state.replay

    def commit(self, verdict: Verdict) -> None:
        # The tokens come first: should the rest be interrupted, they are unread and `prefill` reads them again.
        self.tokens += verdict.tokens
        self.sampler.committed()
        with computing():
            self.state.commit(verdict.path)
        assert self.unread == 0  # the state holds every committed token but the last

    def close(self) -> None:
        self.state.close()


class TransformersTarget:
    """A loaded model; see `leapahead.models.base.Target`.

    Args:
        model: a causal language model of Transformers, also with PEFT adapters. It is only put in evaluation mode.
        name: for reports and messages; by default the model's name or class.
        cache_tokens: greatest number of tokens in the KV cache, all sequences together, each counted with the length of
            the longest; by default as many as fit in 70 % of the free memory of a GPU, or 50 % of the host's.
        eager_choice: choose after all nodes at once and fetch them in one transfer, instead of row by row when read;
            by default on accelerators.
        hidden_states: whether hidden states may be captured, which is tested.
        exclusive: whether nobody else runs the model, whose attention may be replaced then (`grouped`).
        exact: compute every token's logits with the same bits, whatever is decoded beside it (`exact`).
        static: whether forwards have few fixed shapes, which are captured as CUDA graphs: "auto" for graphs on a CUDA
            device where nobody else runs the model and it passes the test (`static.gate`), "graphs" for these or an
            error, "compiled" to compile the shapes in use too, also on the CPU, or "off".
        is_divided: whether the weights may be divided among processes, all of which make the same calls.

    Attributes:
        executor: how the model is run.
        refusals: what the model cannot do, and why.
        autocast: in which it is run, see `modes`.

    Raises:
        BadParameter: `model` is no model of Transformers.
        Refused: the model's own forward cannot be matched, not even token by token; the message names what was tried.
    """

    session_class = TransformersSession

    def __init__(
        self,
        model: Any,
        *,
        name: str | None = None,
        cache_tokens: int | None = None,
        eager_choice: bool | None = None,
        hidden_states: bool = True,
        exclusive: bool = False,
        exact: bool = False,
        static: str | GraphBackend = "auto",
        watched: bool = True,
        is_divided: bool = False,
    ) -> None:
        require_version(transformers.__version__)
        if cache_tokens is not None and (not is_whole(cache_tokens) or cache_tokens < 2):
            raise BadParameter(f"cache_tokens={cache_tokens!r} is not possible: it must be at least 2, or None")
        self.model = model = self._language_model(model, is_divided)
        self.config = families.text_config(model)
        self.autocast, self._given = autocast(), count()
        self.lock, self._name = RLock(), name or model.config.name_or_path or type(model).__name__
        if not model._is_stateful:
            families.attention_implementation(model)
        model.eval()
        with forwards("the test of the model", 1, model.device, self.autocast):
            logits = executors.first_logits(model, self._name)
            self.device, vocab_size = logits.device, logits.shape[-1]
            self.context_length = families.context_length(self.config)
            self._ids = families.ordinary_ids(model.config, self.config, vocab_size)
            own = executors.own_outputs(model, hidden_states and not exact)
            self.executor, self.refusals = self._tested_executor(exclusive, exact, own)
            upgraded = choice.upgraded(self.executor, self._name, self._ids, self.test_prompts(), static, exclusive)
            self.executor, self.refusals = upgraded[0], {**self.refusals, **upgraded[1]}
            layers, refusal = executors.tested_layers(own, self._ids, self.executor)
            self.refusals.update({HIDDEN: refusal} if refusal else {})
        self.info = self._information(
            name=self._name,
            vocab_size=vocab_size,
            context_length=self.context_length,
            precision=torch.finfo(own.precision).eps,  # the logits may have been widened
            capabilities=self.executor.capabilities | ({HIDDEN} if layers else frozenset()),
            fingerprint=families.fingerprint(model, self.device) + executors.manner(self.executor),
            padded=isinstance(self.executor, MaskedExecutor) and self.executor.pads,
            replays=isinstance(self.executor, ReplayExecutor),
            layers=max(0, len(layers) - 1),
            hidden_size=own.hidden_size if layers else 0,
            exact=exact,
            tuned_from=families.tuned_from(model.config),
            mask_token=families.mask_token(model.config),
        )
        self.max_nodes = self.executor.step_rows if isinstance(self.executor, ExactExecutor) else UNLIMITED
        self.max_leaves = 1 if isinstance(self.executor, ReplayExecutor) and not self.executor.masked else UNLIMITED
        if isinstance(self.executor, CachedExecutor):
            self.executor.cache.limit = limit = cache_tokens or usual_tokens(self.executor.cache, self.device)
            self.info = replace(self.info, cache_tokens=limit)
        self.executor.forget()  # the entries of the test
        self._changes = changes.Changes(model if watched and not exclusive else None, self.executor)
        self.has_threads = self.device.type != "cpu"  # a forked process cannot use its parent's accelerator
        self.eager_choice = self.device.type != "cpu" if eager_choice is None else eager_choice
        self._on_host = self.device.type == "cpu" and not self.eager_choice

    def _language_model(self, model: Any, is_divided: bool) -> Any:
        """What the executors run."""
        found = families.language_model(model, is_divided)
        if found.config.is_encoder_decoder:
            raise Refused(
                f"{type(found).__name__} is an encoder-decoder model; its target is made by "
                "leapahead.models.transformers.encoder_decoder.new_target"
            )
        return found

    def _information(self, **known: Any) -> TargetInfo:
        known["suppressed"] = families.suppressed(self.model, known["vocab_size"])
        return TargetInfo(**known, no_drafts=executors.no_drafts(self.model, self.executor, self.refusals))

    def open(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        capture: Capture = NOTHING,
        reserve: int = 0,
        owner: str = "",
    ) -> TransformersSession:
        """See `Target.open`. The entries of a prompt that begins like an earlier one are taken from the cache.

        Hidden states are not kept with the entries, so that no token is taken whose hidden states are captured.
        Top-k tokens are; at least one row of a prompt is read where they are captured, but for a recurrent state, which
        cannot go back by one token.
        """
        require(self.info, capture.needs, "this capture")
        self._changes.look(self)
        prompt = checked_prompt(tokens, self.info)
        again = capture.top_k > 0 and not self.info.replays
        self._layers(capture)  # refuses what there is not
        reuse = capture.reusable(len(prompt), again)
        sampler = self._sampler(params, prompt)  # before there is a state, which nobody would close if this failed
        return TransformersSession(prompt, self._state(prompt, reuse, reserve, owner), sampler, capture)

    def _state(self, tokens: list[int], reuse: int, reserve: int, owner: str) -> State:
        with forwards(f"a prompt of {len(tokens)} tokens", 1, self.device, self.autocast):
            return self.executor.open(tokens, reuse, min(reserve, self.info.context_length), owner)

    def reserve(self, session: TransformersSession, length: int) -> None:
        """See `Reopens`."""
        if isinstance(session.state, CachedState):
            session.state.row.reserved = min(length, self.info.context_length)

    def reopen(self, session: TransformersSession, reserve: int, owner: str) -> None:
        """See `Reopens`. Entries that were given are written again, see `prefill`."""
        owner = owner if session.begin is None else f"given {next(self._given)}"
        session.state = self._state(session.tokens, len(session.tokens) - 1, reserve, owner)

    def open_entries(
        self, tokens: Sequence[int], params: SamplingParams, begin: PromptEntries, capture: Capture, reserve: int = 0
    ) -> TransformersSession:
        """See `TakesEntries`."""
        entries.require(self.info, self.executor, capture)
        session = self.open(tokens, params, replace(capture, top_k=0), reserve, f"given {next(self._given)}")
        session.begin = begin
        try:
            with forwards(f"a prompt of {len(session.tokens)} tokens", 1, self.device, self.autocast):
                entries.write(session.state, begin)
        except BaseException:
            session.close()
            raise
        return session

    def prefill(self, session: TransformersSession, max_tokens: int) -> PromptRows | None:
        start, last = session.state.length, len(session.tokens) - 1
        if session.begin is not None and start < session.begin.tokens:  # an interrupt has cost these entries
            with forwards(f"a prompt of {len(session.tokens)} tokens", 1, self.device, self.autocast):
                entries.write(session.state, session.begin)
            return None
        end = min(start + max_tokens, last)
        if isinstance(self.executor, ExactExecutor):
            end = min(self.executor.chunk_end(start), last)
        assert end > start, "the prompt is read already"
        # Committed tokens that must be read again, after an interrupt, were captured before.
        capture = session.capture if len(session.tokens) == session.sampler.prompt_length else NOTHING
        layers = self._layers(capture)
        first = max(start, last - PROMPT_ROWS)
        rows = max(1, end - first) if capture.top_k else 1
        with forwards(f"a prompt of {len(session.tokens)} tokens", 1, self.device, self.autocast):
            logits, hidden = self.executor.prefill(session.state, end - start, rows, layers)
        if layers:
            logits = logits[first - end :] if capture.top_k and first < end else logits[:0]
            return PromptRows(np.array(session.tokens[start:end]), start, logits, hidden)
        return self._top_k_rows(session, first, logits[first - end :]) if capture.top_k and first < end else None

    def _top_k_rows(self, session: TransformersSession, first: int, logits: Tensor) -> PromptRows | None:
        """The captured rows from position `first`, behind those that are kept with the reused entries before it."""
        assert isinstance(session.state, CachedState)
        row = session.state.row
        found = TopK(first, *best(logits, min(session.capture.top_k, self.info.vocab_size)))
        rows = prompt_rows(row, session.tokens, (first, found.end), session.rows_given, found)
        session.rows_given = found.end
        return rows

    def fork(self, session: TransformersSession, params: SamplingParams) -> TransformersSession:
        assert session.unread == 0, "a session is forked when its prompt is read"
        sampler = self._sampler(params, tokens := list(session.tokens))
        with forwards(f"a prompt of {len(tokens)} tokens", 1, self.device, self.autocast):
            state = self.executor.fork(session.state, tokens)
        forked = self.session_class(tokens, state, sampler)
        forked.begin = session.begin
        return forked

    def step(
        self,
        sessions: Sequence[TransformersSession],
        trees: Sequence[TokenTree],
        num_computed: Sequence[int] | None = None,
        capture: Capture = NOTHING,
    ) -> list[Choices]:
        if capture != NOTHING:
            require(self.info, capture.needs, "this capture")
        if any(session.unread for session in sessions):
            raise LeapaheadError("a session whose prompt is not read cannot be stepped; call target.prefill first")
        context = max(len(session.tokens) for session in sessions)
        with forwards(f"a step at {context} tokens of context", len(sessions), self.device, self.autocast):
            states = [session.state for session in sessions]
            rows = [tree.computed for tree in trees]
            computed = self.executor.forward(states, rows, num_computed, self._layers(capture))
            prepares = isinstance(self.executor, choice.RECORDING) and self.executor.prepares
            parts = [
                choosing.divided(tree, first, output)
                for tree, first, output in zip(trees, num_computed or [0] * len(trees), computed, strict=True)
            ]
            outputs = [nodes for nodes, _ in parts]
            eager = self.eager_choice and num_computed is None  # nobody reads the choices of a draft that grows
            chosen = [choosing.NOT_YET] * len(sessions)
            if eager:
                samplers, logits = [each.sampler for each in sessions], [each.logits for each in outputs]
                chosen = choosing.choose(samplers, trees, logits, capture.top_k)
        found = [
            Choices(logits, tree, session.sampler, known.tokens, num_computed=first, hidden=hidden, best=known.best)
            for session, tree, (logits, hidden), known, first in zip(
                sessions, trees, outputs, chosen, num_computed or [0] * len(trees), strict=True
            )
        ]
        for choices, (_, probes) in zip(found, parts, strict=True):
            choices.probes, choices.prepares = probes, prepares
        return found

    def cost(self, sessions: Sequence[TransformersSession], trees: Sequence[TokenTree]) -> Cost:
        rows = self.executor.rows([session.state for session in sessions], [tree.computed for tree in trees])
        return Cost(rows, len(trees), max(len(session.tokens) for session in sessions))

    def forget(self) -> None:
        """Drops the entries of closed sessions; without open ones their memory too, unless captured forwards use it."""
        if isinstance(self.executor, choice.RECORDING):
            self.executor.clear()
        else:
            self.executor.forget()

    def close(self) -> None:
        """See `HoldsResources`. While a session is open, as of another `LLM` with this target, the memory stays."""
        with self.lock:
            self.executor.forget()

    def warm_up(self, sequences: int) -> None:
        """See `WarmsUp`."""
        if isinstance(self.executor, StaticExecutor):
            with self.lock, forwards("captured forwards", sequences, self.device, self.autocast):
                self.executor.warm_up(sequences, int(self._ids[0]))

    def weights_digest(self) -> str:
        """See `IdentifiesWeights`."""
        return weights.digest(self.model)

    def add_embeddings(self, rows: Any) -> range:
        """See `AddsEmbeddings`. That the model takes embeddings is tested when the first ones are added."""
        require(self.info, frozenset({EMBEDDINGS}), "what adds embeddings")
        assert isinstance(self.executor, MaskedExecutor), "no other has the capability"
        with self.lock:
            self.executor.added = self.executor.added or embeddings.tested(self.model, self.info, self._ids)
            return self.executor.added.add(rows)

    def embeddings(self) -> range:
        """See `AddsEmbeddings`."""
        added = self.executor.added if isinstance(self.executor, MaskedExecutor) else None
        return range(0) if added is None else added.ids

    def ordinary_ids(self) -> IntArray:
        """Token ids without a special meaning, unlike those of padding or images; for tests and measurements."""
        return self._ids

    def test_prompts(self) -> tuple[int, int]:
        """The lengths of the prompts of the self-test."""
        return executors.test_prompts(self.model)

    def _layers(self, capture: Capture) -> Layers:
        """The captured layers, counted from the embedding."""
        count = self.info.layers + 1
        for layer in capture.hidden:
            if not -count <= layer < count:
                raise BadParameter(f"there is no layer {layer} of hidden states: {self.info.name} has 0 to {count - 1}")
        return tuple(layer % count for layer in capture.hidden)

    @computing()  # so that calls in every mode may update what the sampler counts
    def _sampler(self, params: SamplingParams, tokens: list[int]) -> Sampler:
        vocab_size = self.info.vocab_size
        if self._on_host and not params.processors:  # a user's processor is written for tensors
            return Sampler(params, tokens, vocab_size, from_target=choosing.host_logits)
        to_array = partial(choosing.to_device, device=self.device)
        return Sampler(params, tokens, vocab_size, to_array, on_device=not self._on_host)

    def _tested_executor(
        self, exclusive: bool, exact: bool, own: selftest.OwnOutputs
    ) -> tuple[Executor, dict[str, str]]:
        """The executor, and what the model cannot do."""
        usual_length = min(self.context_length + NODES, UNLIMITED)
        if exact:
            own = self.model if exclusive else twin(self.model)
            return executors.tested_exact(own, self._name, self._ids, usual_length), {}
        every = executors.executors(self.model, exclusive, usual_length)
        return executors.tested(self.model, self._name, self._ids, every, own)
