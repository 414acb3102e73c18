"""Any causal language model of Transformers as a target, unpatched: tree attention over a KV cache of our own.

The model is called as anyone may call it, with a 4-D mask, `position_ids` and a `Cache`; which of these it understands
is tested when the target is made, on the model itself (`selftest`), and what fails is refused by name.

Knows neither drafters nor text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from leapahead.core.errors import BadLogits, BadParameter, LeapaheadError, Refused
from leapahead.core.sampling import Sampler, SamplingParams
from leapahead.core.stats import Stats
from leapahead.core.tree import UNLIMITED, IntArray, TokenTree
from leapahead.core.verify import Verdict
from leapahead.models.base import TOP_K, Choices, KeptPrompt, PromptTopK, checked_prompt
from leapahead.models.transformers import families, selftest
from leapahead.models.transformers.forward import (
    CHUNK,
    CachedEngine,
    ChainEngine,
    Engine,
    MaskedEngine,
    NativeEngine,
    State,
    accepts,
)
from leapahead.models.transformers.kv_cache import KVCache

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

# How torch says it, where it has no exception of its own for it: CPU, MPS, cuBLAS.
OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


class TransformersSession:
    """One sequence. The engine's state holds every committed token but the last, which is the next root."""

    def __init__(
        self, tokens: list[int], state: State, sampler: Sampler, prompt_top_k: PromptTopK | None = None
    ) -> None:
        self.tokens = tokens
        self.state = state
        self.sampler = sampler
        self.prompt_top_k = prompt_top_k

    def commit(self, verdict: Verdict) -> None:
        with torch.no_grad():
            self.state.commit(verdict.path)
        self.tokens += verdict.tokens
        self.sampler.committed()
        assert self.state.length == len(self.tokens) - 1  # every committed token but the last

    def close(self) -> None:
        self.state.close()


class TransformersTarget:
    """A loaded model; see `leapahead.models.base.Target`.

    Args:
        model: any causal language model of Transformers. It is put in evaluation mode and otherwise left as it is.
        max_batch: greatest number of sessions open at once; None for as many as memory holds.
        name: for reports and messages; by default the model's name or class.
        eager_choice: choose after all nodes at once and fetch them in one transfer, instead of row by row when read;
            by default on accelerators.

    Raises:
        Refused: the model's own forward cannot be matched, not even token by token; the message says what was tried.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_batch: int | None = None,
        name: str | None = None,
        eager_choice: bool | None = None,
    ) -> None:
        if max_batch is not None and max_batch < 1:
            raise BadParameter(f"max_batch={max_batch} is not possible: it must be at least 1, or None for no limit")
        self.model = model
        self.config = families.text_config(model)
        self.name = name or model.config.name_or_path or type(model).__name__
        self.context_length = families.context_length(self.config)
        self.max_leaves = self.max_nodes = UNLIMITED
        self.max_batch = max_batch
        if model.config.is_encoder_decoder:
            raise Refused(f"{self.name} is an encoder-decoder model; leapahead decodes causal language models")
        if not model._is_stateful:
            families.attention_implementation(model)
        model.eval()
        self.refusals: dict[str, str] = {}
        with torch.no_grad(), self._memory("the test of the model", 1):
            logits = self._first_logits()
            self.vocab_size = logits.shape[-1]
            self.device = logits.device
            self.engine = self._tested_engine()
        self.capabilities = self.engine.capabilities
        self.precision = torch.finfo(model.dtype).eps  # the first logits may have been widened
        self.pads = isinstance(self.engine, MaskedEngine)
        threads = torch.get_num_threads() if self.device.type == "cpu" else torch.cuda.get_device_name(self.device)
        self.fingerprint = " ".join(
            str(part)
            for part in (
                f"transformers {type(model).__name__} {sum(p.numel() for p in model.parameters())} parameters",
                *(getattr(self.config, each, "") for each in ("num_hidden_layers", "hidden_size", "vocab_size")),
                model.dtype,
                families.attention_implementation(model) if not model._is_stateful else "stateful",
                self.device.type,
                threads,
            )
        )
        self._eager_choice = self.device.type != "cpu" if eager_choice is None else eager_choice
        self._on_host = self.device.type == "cpu" and not self._eager_choice

    def open(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        stats: Stats | None = None,
        reserve: int = 0,
        top_k: int = 0,
    ) -> TransformersSession:
        tokens = checked_prompt(tokens, self.vocab_size, self.context_length)
        began = perf_counter()
        with torch.no_grad(), self._memory(f"a prompt of {len(tokens)} tokens", 1):
            kept = KeptPrompt(min(top_k, self.vocab_size)) if top_k and TOP_K in self.capabilities else None
            state, forwards, reused = self.engine.open(tokens, kept and kept.see)
        if stats is not None:
            stats.prompt_tokens += len(tokens)
            stats.prefill_forwards += forwards
            stats.reused_tokens += reused
            stats.prefill_seconds += perf_counter() - began
        sampler = self._sampler(params, tokens)
        return TransformersSession(tokens, state, sampler, kept.found(tokens) if kept is not None else None)

    def _sampler(self, params: SamplingParams, tokens: list[int]) -> Sampler:
        if self._on_host and not params.processors:  # a user's processor is written for tensors
            return Sampler(params, tokens, self.vocab_size, from_target=host_logits)
        return Sampler(params, tokens, self.vocab_size, self._to_device)

    def step(
        self,
        sessions: Sequence[TransformersSession],
        trees: Sequence[TokenTree],
        known: Sequence[int] | None = None,
    ) -> list[Choices]:
        context = max(len(session.tokens) for session in sessions)
        with torch.no_grad(), self._memory(f"a step at {context} tokens of context", len(sessions)):
            logits = self.engine.forward([session.state for session in sessions], trees, known)
            eager = self._eager_choice and known is None  # of a draft that grows nobody reads the choices
            chosen = self._choose(sessions, trees, logits) if eager else [None] * len(sessions)
        return [
            Choices(rows, tree, session.sampler, at_once, first=first)
            for session, tree, rows, at_once, first in zip(
                sessions, trees, logits, chosen, known or [0] * len(trees), strict=True
            )
        ]

    def forget(self) -> None:
        """Gives the cache's memory back, and with it the prompts that could be reused. No session may be open."""
        self.engine.forget()

    def _choose(
        self, sessions: Sequence[TransformersSession], trees: Sequence[TokenTree], logits: Sequence[Tensor]
    ) -> list[IntArray | None]:
        """The choices after all nodes of all sessions, by one transfer from the device."""
        chosen = torch.cat(
            [
                session.sampler.choose(rows, tree, np.arange(len(tree)))
                for session, tree, rows in zip(sessions, trees, logits, strict=True)
            ]
        ).numpy(force=True)
        return list(np.split(chosen, np.cumsum([len(tree) for tree in trees])[:-1]))

    def _to_device(self, array: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def _first_logits(self) -> Tensor:
        """Of the first call of the model, to know their width and where they lie."""
        try:
            logits = selftest.own_logits(self.model, np.zeros((1, 1), dtype=np.int64))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise Refused(f"{self.name} cannot be called with token ids alone: {_first_sentence(error)}") from error
        if logits.isnan().any() or logits.isposinf().any():
            raise BadLogits(f"{self.name} gives NaN or infinite logits for a single token; try dtype float32")
        return logits

    def _tested_engine(self) -> Any:
        """The most able engine that gives the model's own logits."""
        patterns = families.patterns(self.config)
        prompts, ids = self._test_prompts(), self._ordinary_ids()
        # Only a cached token is final where attention is sparse by ranks, or where the model has a state.
        plain = patterns is None or self.model._is_stateful
        for name, build in self._engines(patterns):
            try:
                engine = build()
                cached = NativeEngine(self.model, self.config, shared=True) if plain else None
                result = selftest.run(engine, self.model, ids, prompts, cached)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                self.refusals[name] = f"{type(error).__name__}: {_first_sentence(error)}"
                continue
            if result.passed:
                engine.forget()  # what was said in the test
                if isinstance(engine, CachedEngine):
                    engine.cache.max_rows = self.max_batch  # of which the test needs two
                return engine
            self.refusals[name] = f"logits differ by {result.error:.2g} standard deviations"
        tried = "; ".join(f"{name}: {reason}" for name, reason in self.refusals.items())
        raise Refused(f"{self.name} cannot be decoded exactly ({tried})")

    def _test_prompts(self) -> tuple[int, int]:
        """Their lengths; a small window shall be left behind."""
        reaches = [each.window or each.chunk or UNLIMITED for each in (families.patterns(self.config) or {}).values()]
        return max((reach for reach in reaches if reach <= 24), default=1) + 3, 1

    def _engines(self, patterns: dict[str, families.Pattern] | None) -> Iterator[tuple[str, Callable[[], Engine]]]:
        """What may fit the model, from the most able to the least."""
        model = self.model
        if patterns is not None and not model._is_stateful:
            boolean = families.MASKS[families.attention_implementation(model)]
            if accepts(model, "position_ids", "past_key_values") and not families.counts_slots(self.config):
                if boolean:
                    yield "trees by a boolean mask", lambda: MaskedEngine(model, self._cache(), patterns, True)
                yield "trees by an additive mask", lambda: MaskedEngine(model, self._cache(), patterns, False)
            if accepts(model, "past_key_values"):
                yield "chains", lambda: ChainEngine(model, self._cache())
        yield "token by token", lambda: NativeEngine(model, self.config, shared=False)
        yield "token by token, one session at a time", lambda: NativeEngine(model, self.config, shared=True)

    def _cache(self) -> KVCache:
        return KVCache(usual_length=min(self.context_length + CHUNK, UNLIMITED))

    def _ordinary_ids(self) -> IntArray:
        """Ids without a special meaning, as padding or images have one."""
        configs = (self.model.config, self.config)
        special = {
            value
            for config in configs
            for key, value in config.to_dict().items()
            if key.endswith(("token_id", "token_index"))
            for value in (value if isinstance(value, list) else [value])
        }
        ids = [token for token in range(min(self.vocab_size, 4096)) if token not in special]
        return np.array(ids or [0], dtype=np.int64)

    @contextmanager
    def _memory(self, what: str, batch: int) -> Iterator[None]:
        """One clear sentence where memory runs out. No session has changed then: entries count once committed."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise self._out_of_memory(what, batch) from error
        except RuntimeError as error:
            if not any(sign in str(error) for sign in OUT_OF_MEMORY):
                raise
            raise self._out_of_memory(what, batch) from error

    def _out_of_memory(self, what: str, batch: int) -> LeapaheadError:
        return LeapaheadError(
            f"out of memory in {what}, batch {batch}, on {self.model.device}; "
            "use a smaller batch, a shorter context, or dtype bfloat16"
        )


def host_logits(logits: Tensor) -> npt.NDArray[np.floating[Any]]:
    """Logits on the CPU as float32 or float64 for numpy, which works on a row in one thread, in its own cache.

    torch wakes a second thread for a row of a large vocabulary, and its argmax takes 20 to 50 times as long as numpy's:
    together about a millisecond a step.
    """
    logits = logits.detach()
    if logits.dtype == torch.bfloat16:  # the upper half of a float32
        bits = logits.view(torch.int16).numpy().astype(np.uint32)
        bits <<= 16
        return bits.view(np.float32)
    return logits.numpy() if logits.dtype == torch.float64 else logits.float().numpy()


def load(
    name_or_path: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    trust_remote_code: bool = False,
    max_batch: int | None = None,
) -> tuple[TransformersTarget, Any]:
    """Loads a model and its tokenizer from a folder or the Hugging Face hub.

    Args:
        name_or_path: a folder with config.json, or a hub id.
        dtype: "auto" for the checkpoint's own, or a name of `DTYPES`.
        device: "auto" for an accelerator if there is one, else the CPU.
        trust_remote_code: whether the repository's own Python code may run.
        max_batch: see `TransformersTarget`.

    Returns:
        The target, and the tokenizer or None if there are no files of one.

    Raises:
        BadParameter: no such model, dtype or device.
        Refused: not a causal language model, or one that cannot be decoded exactly.
    """
    import transformers

    name = str(name_or_path)
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise BadParameter(f"the folder {name!r} has no config.json, so it is not a Transformers model")
        name = str(folder)
    elif folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise BadParameter(f"there is no folder {name!r}; give the folder of a Transformers model, or a hub id")
    where = _device(device)
    options = {"trust_remote_code": trust_remote_code}
    try:
        config = transformers.AutoConfig.from_pretrained(name, **options)
        if config.is_encoder_decoder:
            raise Refused(f"{name} is an encoder-decoder model ({config.model_type}); leapahead decodes causal ones")
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            name, config=config, dtype=_dtype(dtype), output_loading_info=True, **options
        )
    except (OSError, ValueError, ImportError) as error:
        if isinstance(error, LeapaheadError):
            raise
        raise BadParameter(f"the model {name!r} cannot be loaded: {_first_sentence(error)}") from error
    if report["missing_keys"]:
        some = ", ".join(sorted(report["missing_keys"])[:3])
        raise Refused(f"the checkpoint {name!r} lacks weights ({some}, ...), so it is not a whole causal model")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, **options)
    except (OSError, ValueError, ImportError, KeyError, TypeError):
        tokenizer = None
    try:
        model = model.to(where)
    except torch.OutOfMemoryError as error:
        raise LeapaheadError(f"the model {name!r} does not fit on {where}; use dtype bfloat16, or the CPU") from error
    return TransformersTarget(model, name=name, max_batch=max_batch), tokenizer


def _dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    if dtype == "auto" or (isinstance(dtype, torch.dtype) and dtype in DTYPES.values()):
        return dtype
    if isinstance(dtype, str) and dtype in DTYPES:
        return DTYPES[dtype]
    raise BadParameter(f"dtype {str(dtype)!r} is not possible; there are auto, {', '.join(DTYPES)}")


def _device(device: str | torch.device) -> torch.device:
    if device == "auto":
        kinds = (("cuda", torch.cuda.is_available()), ("mps", torch.backends.mps.is_available()), ("cpu", True))
        return torch.device(next(kind for kind, there in kinds if there))
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise BadParameter(f"device {str(device)!r} is not possible; there are auto, cpu, cuda, cuda:N, mps") from error
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise BadParameter(f"device {str(device)!r} is not there: torch sees {torch.cuda.device_count()} CUDA devices")
    if found.type == "mps" and not torch.backends.mps.is_available():
        raise BadParameter("device 'mps' is not there: this is no Apple GPU, or torch was built without it")
    if found.type not in ("cpu", "cuda", "mps"):
        raise BadParameter(f"device {str(device)!r} is not possible; there are auto, cpu, cuda, cuda:N, mps")
    return found


def _first_sentence(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
