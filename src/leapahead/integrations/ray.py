"""Ray jobs: a class for `Dataset.map_batches`, and a named actor by which its replicas exchange drafter caches.

    Dataset ──batches──> Generate (replica 1) ──every N batches──> DrafterCacheActor
            ──batches──> Generate (replica 2) <──what all know────

Ray is imported by `drafter_cache_actor` only. What is exchanged changes the speed of decoding, never a text.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import numpy as np

from leapahead.api import LLM
from leapahead.core.errors import (
    BadLogits,
    BadParameter,
    CacheFull,
    ContextOverflow,
    LeapaheadError,
    first_line,
    needing,
)
from leapahead.core.parameters import whole
from leapahead.drafters.cache import DrafterCache
from leapahead.engine.request import Handle
from leapahead.engine.waiting import check
from leapahead.inputs import Options, check_values
from leapahead.integrations.ray_rows import OUTPUTS, Columns, Row, as_lists, row_seed, rows
from leapahead.option_names import check_names
from leapahead.results import Result

__all__ = ["DrafterCacheActor", "Generate", "drafter_cache_actor", "row_seed"]

MOST_FAILURES = 3  # exchanges that fail in a row, after which no further one is tried
ERRORS = ("column", "raise")
OF_ROW = (BadParameter, ContextOverflow, CacheFull, BadLogits)  # what a row can cause; all else is the machine's


class Generate:
    """Completes the prompts of a data set, for `Dataset.map_batches(Generate, fn_constructor_kwargs=..., ...)`.

    Columns that are read, of which all but the first may be missing, and missing or NaN in a row:

    - `prompt`: text, token ids, or chat messages.
    - `row_id`: a number or string that identifies the row, for its seed.
    - `prediction`: what the text is expected to be: text or token ids.
    - `seed`: of this row, instead of a derived one.
    - `max_new_tokens`: of this row.

    Columns that are added:

    - `text`, `tokens`: as of `Result`; "" and none in a row that failed.
    - `finish_reason`: "stop", "length", or "error".
    - `acceptance_length`: committed tokens per step; NaN in a row that failed.
    - `error`: one sentence about what is wrong with the row; "" if nothing is.

    The seed of a row without one is derived from `seed` and its `row_id`, or from `seed` and its prompt where the data
    set has no column `row_id`; so equal prompts get equal texts there. It never depends on the row's place in a batch.
    A job that is retried, or divided in another way, gives the same texts.

    Args:
        model: as of `LLM`.
        llm: further arguments of `LLM`, for example `{"max_batch": 16, "exact": True}`.
        seed: of the job, a whole number.
        columns: meaning -> name of the column, where it is not the name above.
        errors: "column" to go on after a row that is not possible, "raise" to end the job with its error.
        exchange: the handle from `drafter_cache_actor`; None to exchange nothing.
        exchange_every: number of batches between two exchanges.
        options: of `LLM.generate`, for all rows.

    Attributes:
        llm: the model.

    Raises:
        LeapaheadError: one clear sentence for whatever is wrong with the arguments.
    """

    def __init__(
        self,
        model: Any = None,
        *,
        llm: Mapping[str, Any] | None = None,
        seed: int = 0,
        columns: Mapping[str, str] | None = None,
        errors: str = "column",
        exchange: Any = None,
        exchange_every: int = 4,
        **options: Any,
    ) -> None:
        check_names(options)
        for name in ("n", "logprobs"):
            if name in options:
                raise BadParameter(f"{name}={options[name]!r} is not possible: a row has one text and no {name}")
        if errors not in ERRORS:
            raise BadParameter(f"errors={errors!r} is not possible: it must be one of {', '.join(ERRORS)}")
        for name, given in (("llm", llm), ("columns", columns)):
            if not isinstance(given, Mapping | None):
                raise BadParameter(f"{name}={given!r} is not possible: it must be a dictionary of names and values")
        self._seed, self._raises = whole("seed", seed), errors == "raise"
        self._columns, self._options = Columns(columns or {}), cast(Options, options)
        check_values(self._options)
        every = whole("exchange_every", exchange_every, least=1)
        self.llm = LLM(model, **dict(llm or {}))
        ((request, _),) = self.llm.requests([[0]], self._options)  # what is wrong with all rows is refused at once
        if request.lossy or (request.sampling.temperature > 0 and not request.drafter.same_text):
            what = f"acceptance={request.lossy!r}" if request.lossy else f"the drafter {request.drafter.name!r}"
            raise BadParameter(
                f"{what} is not possible in a job: its texts depend on what is drafted, so that a row that is retried "
                "would get another one; leave it out"
            )
        self._exchange: Exchange | None = None
        if exchange is not None:
            if self.llm.drafter_cache is None:
                raise BadParameter("drafter_cache=False keeps nothing that could be exchanged; leave out exchange=...")
            if getattr(exchange, "exchange", None) is None:
                raise BadParameter(f"exchange={exchange!r} is not possible: give it what drafter_cache_actor() returns")
            self._exchange = Exchange(exchange, self.llm.drafter_cache, every)

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The batch with the columns of results.

        Raises:
            LeapaheadError: the batch is not possible; or a row, with `errors="raise"`.
        """
        found = self._columns.read(batch)
        if "prediction" in found:  # a drafter that makes no use of it concerns all rows
            self.llm.requests([[0]], cast(Options, {**self._options, "prediction": [0]}))
        if self._exchange is not None:
            self._exchange.take()
        results = self._generate([*rows(found, self._seed)])
        if self._exchange is not None:
            self._exchange.after_batch()
        return {
            **batch,
            **{self._columns.names[name]: as_lists(found[name]) for name in ("prompt", "prediction") if name in found},
            **{self._columns.names[name]: _column(name, results) for name in OUTPUTS},
        }

    def _generate(self, listed: Sequence[Row | BadParameter]) -> list[Result | LeapaheadError]:
        """The result of each row, or what ended it. Errors that no row can cause are raised."""
        engine = self.llm.engine
        submitted: list[Handle | LeapaheadError] = []
        try:
            for row in listed:
                submitted.append(self._submit(row))
            return [self._finished(each) if isinstance(each, Handle) else each for each in submitted]
        finally:
            engine.cancel(*(each for each in submitted if isinstance(each, Handle)))

    def _submit(self, row: Row | BadParameter) -> Handle | LeapaheadError:
        try:
            if isinstance(row, BadParameter):
                raise row
            options = cast(Options, {**self._options, **row.options, "seed": row.seed})
            ((request, _),) = self.llm.requests([row.prompt], options)
            return self.llm.engine.submit(request)
        except LeapaheadError as error:
            return self._failed(error)

    def _finished(self, handle: Handle) -> Result | LeapaheadError:
        try:
            self.llm.engine.run([handle])
            check(handle)
        except LeapaheadError as error:
            return self._failed(error)
        return self.llm.writer(self._options).result(handle)

    def _failed(self, error: LeapaheadError) -> LeapaheadError:
        if self._raises or not isinstance(error, OF_ROW):
            raise error
        return error


def _column(name: str, results: Sequence[Result | LeapaheadError]) -> np.ndarray[Any, Any]:
    """A column of results."""
    values = [_value(name, result) for result in results]
    return np.array(values, dtype=np.float64) if name == "acceptance_length" else as_lists(values)


def _value(name: str, result: Result | LeapaheadError) -> Any:
    if isinstance(result, Result):
        if name == "acceptance_length":
            return result.stats.acceptance_length
        return "" if name == "error" else getattr(result, name)
    failed = {"finish_reason": "error", "acceptance_length": np.nan, "error": first_line(result), "tokens": []}
    return failed.get(name, "")


class Exchange:
    """The exchange of one replica with the actor. It never waits: a reply is taken when it has come.

    Args:
        actor: has the method `exchange` of `DrafterCacheActor`. `exchange.remote(data).future()` gives a future.
        cache: of the replica.
        every: number of batches between two exchanges.
    """

    def __init__(self, actor: Any, cache: DrafterCache, every: int) -> None:
        self._actor, self._cache, self._every = actor, cache, every
        self._batches, self._failures, self._warned = 0, 0, False
        self._reply: Future[bytes | None] | None = None
        self._send()  # what others know already helps with the first texts

    def take(self) -> None:
        """Merges the actor's reply, if it has come."""
        if self._reply is None or not self._reply.done():
            return
        reply, self._reply = self._reply, None
        try:
            if (data := reply.result()) is not None:
                self._cache.merge_bytes(data)
            self._failures = 0
        except Exception as error:  # of Ray, whose errors this module does not import, or of the data
            self._fail(error)

    def after_batch(self) -> None:
        """Counts a batch, and sends what is known if it is time and no reply is due."""
        self._batches += 1
        self.take()
        if self._batches % self._every == 0:
            self._send()

    def _send(self) -> None:
        if self._reply is not None or self._failures >= MOST_FAILURES:
            return
        try:
            self._reply = self._actor.exchange.remote(self._cache.to_bytes()).future()
        except Exception as error:  # as above
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._failures += 1
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"the exchange of drafter caches failed ({first_line(error)}); this replica goes on with its own, and "
                "the texts stay the same",
                UserWarning,
                stacklevel=3,
            )


class DrafterCacheActor:
    """Keeps what the replicas of a job have learned, and gives it to each of them. `drafter_cache_actor` makes one.

    It needs no model. Its memory is bounded as that of a drafter cache, see `DrafterCache.to_bytes`.
    """

    def __init__(self) -> None:
        self._cache = DrafterCache()
        self._exchanges = 0

    def exchange(self, data: bytes) -> bytes | None:
        """Merges what a replica knows.

        Returns:
            What all know together; None if the replica knows it already.

        Raises:
            BadParameter: see `DrafterCache.merge_bytes`.
        """
        self._cache.merge_bytes(data)
        self._exchanges += 1
        known = self._cache.to_bytes()
        return None if known == data else known

    def state(self) -> bytes:
        """What all know together, for `DrafterCache.merge_bytes`."""
        return self._cache.to_bytes()

    def save(self, path: str | Path) -> str:
        """Writes it to a file on the actor's machine, for `LLM(drafter_cache=...)`, merged with what is there."""
        cache = DrafterCache()
        cache.merge_bytes(self.state())
        cache.activate()
        return str(cache.save(path))

    def figures(self) -> dict[str, int]:
        """Number of exchanges, and the size of what is known, in bytes."""
        return {"exchanges": self._exchanges, "bytes": len(self.state()) if self._cache.vocab_size else 0}


def drafter_cache_actor(name: str = "leapahead-drafter-cache", **options: Any) -> Any:
    """The handle of the named actor, which is created if there is none of that name. Call it after `ray.init`.

    Args:
        name: replicas with the same model use the same one; each vocabulary needs its own.
        options: of the actor as of `ray.remote`, for example `lifetime="detached"`, so that it outlives the job. All
            later jobs that ask for it find it, in the namespace "leapahead" where `namespace` names no other one.

    Raises:
        LeapaheadError: Ray is not installed.
    """
    with needing("drafter_cache_actor", "ray", "ray"):
        import ray
    given = {"num_cpus": 0, "max_restarts": -1, **options}
    if given.get("lifetime") == "detached":  # Ray gives each job that names no namespace one of its own
        given.setdefault("namespace", "leapahead")
    return ray.remote(DrafterCacheActor).options(name=name, get_if_exists=True, **given).remote()
