"""Prompts and chat messages in, text out: `LLM`, and `AsyncLLM` for asyncio. A backend is imported by `LLM(...)`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, overload

from leapahead.core.errors import BadParameter, LeapaheadError
from leapahead.core.parameters import MOST_BATCH, MOST_SAMPLES, whole
from leapahead.core.relaxed import EXACT, Relaxed, rule
from leapahead.core.sampling import SamplingParams
from leapahead.core.text import Tokenizer
from leapahead.drafters import cache_sections, registry
from leapahead.drafters.cache import DrafterCache
from leapahead.drafters.draft_models import given, names
from leapahead.engine.driver import Driver
from leapahead.engine.request import Handle, Request
from leapahead.engine.scheduler import Engine
from leapahead.inputs import Inputs, Options, Prompt, Prompts, check_names, drafter_options, encode, is_single, seeds
from leapahead.models import loading
from leapahead.results import Piece, Result, Writer

if TYPE_CHECKING:
    import asyncio
    from typing import Self

    from typing_extensions import Unpack

T = TypeVar("T")


class LLM:
    """A model that emits several tokens per forward pass, with exactly the text of one at a time.

    It may be used from several threads: their requests are decoded together, each with the text that it has alone.

    Args:
        model: a hub name, a folder, a GGUF file, a loaded `torch.nn.Module` or `Target`; None or "bundled" for ours.
        engine: what computes: "transformers", "llama.cpp", "openvino" or "auto", see `models.loading.load`.
        tokenizer: instead of the model's own. A loaded model or a target without one takes prompts of token ids.
        drafter: a registered name (`leapahead drafters` lists them), or a subclass of `Drafter` or `SequenceDrafter`.
        dtype: "auto", "float32", "bfloat16" or "float16"; of a model given by name or folder.
        device: "auto", "cpu", "cuda", "mps", "xpu"; "balanced" divides the layers among GPUs. Of a name or folder.
        max_batch: greatest number of sequences decoded together; further prompts join as others end.
        prefill_chunk: see `Engine`.
        cache_tokens: the most tokens in the KV cache, but for GGUF files; by default what fits in half the memory.
        exact: compute every token's logits with the same bits, whatever is drafted or decoded beside it.
        trust_remote_code: run Python code that comes with the model.
        draft: a smaller model that drafts (for `draft_model` and `auto`): a name, a folder, a GGUF file, "bundled" for
            the bundled one, or a loaded one; or several. It has the target's tokenizer; loaded with the same options.
        head: a head trained for this model (for `head`, `auto`): its folder, "mtp" for its own checkpoint's modules,
            "bundled" for the bundled one; or several.
        drafter_cache: what drafters learn from one text for the next, which changes speed and never text. True keeps
            it as long as this LLM lives; False keeps nothing; a file is read if it exists, and `save_drafter_cache`
            writes it; a `DrafterCache` is shared with others of the same vocabulary. Full of sampled texts it takes an
            estimated 100 MB. It holds pieces of texts: users who must not learn of each other's get one each, or none.
        acceptance: "exact", or a relaxed rule, whose texts are lossy: see `leapahead.core.relaxed`.
        options: of the drafter, for example `window=7, ngram=5, guesses=7`; and of the engine, for example `n_ctx=8192`
            or `static="compiled"` (see `LlamaCppOptions`, `OpenVinoOptions` and `models.loading.load`).

    Attributes:
        target: the loaded model.
        tokenizer, eos_token_ids: its tokenizer, None where there is none, and the ids that end a text.
        inputs: turns prompts and options into token ids and parameters, and compiles grammars.
        drafter_name: name of the default drafter.
        engine: the engine that decodes.
        drafter_cache: what drafters keep between texts; None where nothing is kept.

    Raises:
        LeapaheadError: one clear sentence for whatever is wrong.
    """

    def __init__(
        self,
        model: Any = None,
        *,
        engine: str = "auto",
        tokenizer: Tokenizer | str | None = None,
        drafter: str | registry.DrafterClass = "auto",
        dtype: str = "auto",
        device: str = "auto",
        max_batch: int = 8,
        prefill_chunk: int | None = None,
        cache_tokens: int | None = None,
        exact: bool = False,
        trust_remote_code: bool = False,
        draft: Any = None,
        head: Any = None,
        drafter_cache: DrafterCache | str | Path | bool = True,
        acceptance: str | Relaxed = EXACT,
        **options: Any,
    ) -> None:
        whole("max_batch", max_batch, 1, MOST_BATCH)
        self._chosen, self._acceptance = drafter, rule(acceptance) or EXACT
        backend = {name: options.pop(name) for name in loading.ENGINE_OPTIONS if name in options}
        backend |= {"engine": engine, "dtype": dtype, "device": device}
        self._networks = {} if head is None else {"head": head}
        named = {} if draft is None else {"draft": names(draft)}
        registry.make(drafter, **options, **self._networks, **named)  # refuses before the load, which may take long
        self.drafter_cache = cache_sections.given(drafter_cache)
        loaded = loading.load(
            model,
            tokenizer=tokenizer,
            trust_remote_code=trust_remote_code,
            cache_tokens=cache_tokens,
            exact=exact,
            sequences=max_batch,
            branching=registry.branching(drafter),
            **backend,
        )
        self.target, self.tokenizer, self.eos_token_ids = loaded.target, loaded.tokenizer, loaded.eos_token_ids
        self.engine = Engine(self.target, tokenizer=self.tokenizer, max_batch=max_batch, prefill_chunk=prefill_chunk)
        if draft is not None:
            self._networks["draft"] = given(draft, **backend)
        self._drafter = self.engine.drafter(drafter, **options, **self._networks)
        self.drafter_name = self._drafter.name
        self.inputs = Inputs(self.target.info, self.tokenizer, self.eos_token_ids)
        if self.drafter_cache is not None:
            name = partial(cache_sections.vocabulary, self.tokenizer, self.target.info.vocab_size)
            self.drafter_cache.belong(name if drafter_cache is True else name(), self.target.info.vocab_size)

    def __repr__(self) -> str:
        return f"LLM({self.target.info.name!r}, drafter={self.drafter_name!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("an LLM cannot be copied or pickled; make one in the process that uses it, LLM('name or path')")

    def close(self) -> None:
        """Cancels what is running and releases the caches. The LLM takes no further prompts."""
        self.engine.close()
        loading.close(self.target)

    @overload
    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Result: ...

    @overload
    def generate(self, prompt: Prompts, **options: Unpack[Options]) -> list[Result]: ...

    def generate(self, prompt: Any, **options: Unpack[Options]) -> Any:
        """Completes a prompt, or a list of prompts together.

        Args:
            prompt: text, token ids, or chat messages ({"role", "content"} each), which go through the tokenizer's chat
                template; or a list of those, and the results come in its order.
            max_new_tokens: 128 by default.
            temperature: 0 (greedy) by default. Above 0 the text is a function of the seed.
            top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty: see `SamplingParams`.
            logit_bias: token id -> number that is added to its logits in every step.
            bad_words: strings or token sequences that must not appear. A string is banned as the tokenizer writes it at
                the beginning of a text and after a space.
            min_new_tokens: before so many no EOS and none of `stop_token_ids`.
            seed: of the Gumbel noise: one for all prompts, or a list; by default one at random for each, in its result.
            n: number of samples of each prompt, which is read once. Sample i has the prompt's seed plus i.
            logprobs: report the log-probability of every token, and of so many likeliest alternatives: log-softmax of
                the model's unprocessed logits.
            stop: strings that end the text, which then ends before them.
            stop_token_ids: ids that end the text; like EOS they are the last of its `tokens`.
            ignore_eos: go on after an EOS.
            include_stop: let the text end after the stop string.
            logits_processors: the user's own, with Transformers' convention; see `LogitsProcessor`.
            criteria: called with all tokens after each new one; true ends the text.
            drafter, drafter_options: for this call, instead of the LLM's.
            prediction: what the text is expected to be: text or token ids, for all prompts, or a list with one (or
                None) for each. Wrong parts cost time, never text. A drafter that makes no use of it is refused.
            grammar: the form of the text, see `Grammar`; for all prompts, or a list with one (or None) for each.
            acceptance: for this call, instead of the LLM's.

        Returns:
            A `Result`, or a list of them for a list of prompts. With `n`, a list of n results in place of each.

        Raises:
            LeapaheadError: one clear sentence for whatever is wrong.
        """
        single = is_single(prompt)
        requests = self.requests([prompt] if single else list(prompt), options)
        groups: list[list[Handle]] = []
        try:
            for request, sampling in requests:
                groups.append(self.engine.submit_samples(request, sampling))
            handles = [handle for group in groups for handle in group]
            self.engine.run(handles)
        finally:
            for handle in (handle for group in groups for handle in group):
                self.engine.cancel(handle)
        return self._results(groups, options, single)

    def _results(self, groups: list[list[Handle]], options: Options, single: bool) -> Any:
        for handle in (handle for group in groups for handle in group):
            check(handle)
        results = [[self.writer(options).result(handle) for handle in group] for group in groups]
        found = results if "n" in options else [group[0] for group in results]
        return found[0] if single else found

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Generator[Piece, None, None]:
        """Completes one prompt, piece by piece as the steps go. Arguments as of `generate`, but for `n`.

        Yields:
            A `Piece` per step. While a piece is not taken, the request is not stepped. Closing the generator ends the
            text there.
        """
        return self._pieces(self._streamed(prompt, options), self.writer(options))

    def _pieces(self, request: Request, writer: Writer) -> Generator[Piece, None, None]:
        handle = self.engine.submit(request)
        for output in self.engine.outputs(handle):
            yield writer.piece(handle, output)
        check(handle)

    def _streamed(self, prompt: Prompt, options: Options) -> Request:
        if not is_single(prompt) or "n" in options:
            raise BadParameter("stream takes one prompt and gives one text; use generate for a list or for n samples")
        ((request, _),) = self.requests([prompt], options, stream=True)
        return request

    def requests(
        self, prompts: list[Prompt], options: Options, stream: bool = False
    ) -> list[tuple[Request, list[SamplingParams]]]:
        """What `generate` submits to the engine: a request for each prompt, with the parameters of its samples."""
        check_names(options)
        drafter = self._drafter
        if "drafter" in options or "drafter_options" in options:
            chosen, given = options.get("drafter", self._chosen), drafter_options(options)
            kind = registry.load(chosen) if isinstance(chosen, str) else chosen
            given = {name: each for name, each in self._networks.items() if name in registry.options(kind)} | given
            drafter = self.engine.drafter(chosen, **given)
        predictions = self.inputs.predictions(options.get("prediction"), len(prompts), drafter)
        samples = whole("n", options.get("n", 1), 1, MOST_SAMPLES)
        all_seeds = seeds(options.get("seed"), len(prompts), samples, options.get("temperature", 0.0) != 0)
        stop = self.inputs.stop(options)
        grammars = self.inputs.grammar(options, len(prompts))
        found = []
        for prompt, own_seeds, prediction, form in zip(prompts, all_seeds, predictions, grammars, strict=True):
            sampling = [self.inputs.sampling(options, seed, form) for seed in own_seeds]
            request = Request(
                encode(prompt, self.tokenizer, self.target.info),
                drafter,
                sampling[0],
                stop,
                prediction,
                self.drafter_cache,
                options.get("logprobs"),
                stream,
                acceptance=rule(options.get("acceptance", self._acceptance)),
            )
            found.append((request, sampling))
        return found

    def writer(self, options: Options, tokenizer: Tokenizer | None = None) -> Writer:
        """Turns the outputs of one request into text, by another tokenizer than the model's if one is given."""
        strings = (stop,) if isinstance(stop := options.get("stop", ()), str) else tuple(stop)
        return Writer(tokenizer or self.tokenizer, strings, options.get("include_stop", False))

    def save_drafter_cache(self, path: str | Path | None = None) -> Path:
        """Writes the drafter cache to a file, merged with what other processes saved there.

        Args:
            path: by default the file that `drafter_cache` named.

        Returns:
            The file. It holds pieces of prompts and texts; a new one can be read by its owner only.

        Raises:
            BadParameter: nothing is kept, there is nowhere to write, or what is there is something else.
        """
        if self.drafter_cache is None:
            raise BadParameter("drafter_cache=False keeps nothing that could be saved; leave it out, or name a file")
        return self.drafter_cache.save(path)

    @contextmanager
    def without_drafter_cache(self) -> Iterator[None]:
        """Inside, texts are decoded without what earlier texts taught, and teach nothing: to measure a prompt twice."""
        kept, self.drafter_cache = self.drafter_cache, None
        try:
            yield
        finally:
            self.drafter_cache = kept


class AsyncLLM:
    """An `LLM` for asyncio: tasks await their texts, which are decoded together in a thread of its own.

    Args:
        model: an `LLM`, or what `LLM` takes; `options` are those of `LLM`.
    """

    def __init__(self, model: Any = None, **options: Any) -> None:
        if isinstance(model, LLM) and options:
            raise BadParameter(f"{', '.join(options)} belong to the LLM, which is made already; give them to LLM(...)")
        self.llm = model if isinstance(model, LLM) else LLM(model, **options)
        self._driver = Driver(self.llm.engine)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancels what is running, ends the thread and releases the caches. The end of the program does the same."""
        await _in_thread(self.llm.close)
        await _in_thread(self._driver.join)

    @overload
    async def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Result: ...

    @overload
    async def generate(self, prompt: Prompts, **options: Unpack[Options]) -> list[Result]: ...

    async def generate(self, prompt: Any, **options: Unpack[Options]) -> Any:
        """As `LLM.generate`. Cancelling the task cancels its requests."""
        single, llm = is_single(prompt), self.llm
        requests = await _in_thread(llm.requests, [prompt] if single else list(prompt), options)
        changed, notify = wake_up()
        groups: list[list[Handle]] = []
        try:
            for request, sampling in requests:
                groups.append(await self.submit(request, sampling, notify))
            handles = [handle for group in groups for handle in group]
            while not over(handles):
                await changed.wait()
                changed.clear()
        finally:
            for handle in (handle for group in groups for handle in group):
                llm.engine.cancel(handle, wait=False)
        return llm._results(groups, options, single)

    async def stream(self, prompt: Prompt, **options: Unpack[Options]) -> AsyncGenerator[Piece, None]:
        """As `LLM.stream`. Cancelling the task, or closing the generator, cancels the request."""
        llm = self.llm
        request = await _in_thread(llm._streamed, prompt, options)
        writer, (changed, notify) = llm.writer(options), wake_up()
        (handle,) = await self.submit(request, [request.sampling], notify)
        try:
            while True:
                changed.clear()
                over = handle.done  # before it is polled, lest the last output come in between
                if (output := llm.engine.poll(handle)) is not None:
                    yield writer.piece(handle, output)
                elif over:
                    check(handle)
                    return
                else:
                    await changed.wait()
        finally:
            llm.engine.cancel(handle, wait=False)

    async def submit(
        self, request: Request, sampling: Sequence[SamplingParams], notify: Callable[[], None]
    ) -> list[Handle]:
        """As `Engine.submit_samples`; a thread of this object drives the engine."""
        engine = self.llm.engine
        if engine.is_stepping:
            raise LeapaheadError("a criterion, processor or callback cannot wait for a request of its own engine")
        await _in_thread(engine.prepare, request.drafter)  # it may measure; a task cancelled meanwhile is gone
        handles = engine.submit_samples(request, sampling, notify)
        self._driver.start()
        return handles


async def _in_thread(function: Callable[..., T], *args: Any) -> T:
    """Runs the function in a thread, so that the event loop goes on meanwhile."""
    import asyncio

    return await asyncio.to_thread(function, *args)


def wake_up() -> tuple[asyncio.Event, Callable[[], None]]:
    """An event of the running loop, and a function that sets it from any thread."""
    import asyncio

    loop, event = asyncio.get_running_loop(), asyncio.Event()

    def notify() -> None:
        with suppress(RuntimeError):  # the loop was closed, so nobody waits
            loop.call_soon_threadsafe(event.set)

    return event, notify


def over(handles: Sequence[Handle]) -> bool:
    """Whether nothing is to be waited for: all of them are over, or one has failed."""
    return all(handle.done for handle in handles) or any(handle.error is not None for handle in handles)


def check(handle: Handle) -> None:
    """Raises what ended a request before its text was complete."""
    if handle.error is not None:
        raise handle.error
    if handle.finish_reason == "cancelled":
        raise LeapaheadError("the request was cancelled, since the LLM was closed")
