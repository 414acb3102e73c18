"""Prompts and chat messages in, text out: `LLM`. A backend is imported by `LLM(...)`."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, NoReturn, Self, Unpack, overload

from leapahead.core.errors import BadParameter
from leapahead.core.parameters import MOST_BATCH, MOST_SAMPLES, whole
from leapahead.core.relaxed import EXACT, Relaxed, rule
from leapahead.core.sampling import SamplingParams
from leapahead.core.text import Tokenizer
from leapahead.drafters import cache_sections, registry, trained_heads
from leapahead.drafters.cache import DrafterCache
from leapahead.drafters.draft_models import given, names
from leapahead.engine.request import Handle, Request
from leapahead.engine.scheduler import Engine
from leapahead.engine.waiting import check
from leapahead.inputs import (
    Inputs,
    OneText,
    Options,
    Prompt,
    Prompts,
    drafter_options,
    encode,
    is_single,
    seeds,
)
from leapahead.models import loading, origin
from leapahead.option_names import check_names, check_spelling
from leapahead.progress import Told, shown
from leapahead.results import Piece, Result, Writer


class LLM:
    """A model that emits several tokens per forward pass, with exactly the text of one at a time.

    It may be used from several threads: their requests are decoded together, each with the text that it has alone.

    Args:
        model: a hub name, a folder, a GGUF file, a loaded `torch.nn.Module` or `Target`; None or "bundled" for the one
            that comes with this package.
        engine: what computes: "transformers", "llama.cpp", "openvino", or "auto": OpenVINO for its own folders,
            llama.cpp for GGUF files, Transformers for all others. See `leapahead.models.loading.load`.
        tokenizer: instead of the model's own: a loaded one, or its name or folder. A loaded model or a target without
            one takes prompts of token ids.
        drafter: a registered name (`leapahead drafters` lists them), or a subclass of `Drafter` or `SequenceDrafter`.
        dtype: "auto" (the type that the model was saved in), "float32", "bfloat16" or "float16"; of a model of
            Transformers that is given by name or folder.
        device: "auto" (an accelerator if there is one), "cpu", "cuda", "cuda:1", "mps", "xpu"; "balanced" divides the
            layers among GPUs. Of a model that is given by name or folder.
        max_batch: greatest number of sequences decoded together, by default 8; further prompts join as others end. The
            KV cache of a GGUF file has room for so many texts of the greatest length only where it is given.
        prefill_chunk: greatest number of prompt tokens that are read between two steps of running requests; by default
            as many as take about four plain steps.
        cache_tokens: greatest number of tokens in the KV cache, all sequences together; by default as many as fit in
            half of the free memory, or 70 % of a GPU's. A GGUF file has `n_ctx` instead.
        exact: compute every token's logits with the same bits, whatever is drafted or decoded beside it; slower.
        trust_remote_code: run Python code that comes with the model, or with a draft model that is given by name.
        draft: a smaller model that drafts (for `auto` and the drafters that take one): a name, a folder, a GGUF file,
            "bundled" for the bundled one, or a loaded one; or a list of them. It must have the target's tokenizer, and
            is loaded with the same `dtype`, `device` and engine options.
        head: a head trained for this model (for `auto` and `head`): its folder, "mtp" for the modules in the model's
            own checkpoint, "bundled" for that of the bundled model; or a list of them.
        drafter_cache: what drafters learn from one text for the next, which changes speed and never text. True keeps
            it as long as this LLM lives; False keeps nothing; a file is read if it exists, and `save_drafter_cache`
            writes it; a `DrafterCache` is shared with others of the same vocabulary. Full of sampled texts it takes an
            estimated 100 MB. It holds pieces of texts: users who must not learn of each other's get one each, or none.
        acceptance: "exact", or a relaxed rule, whose texts are lossy: see `leapahead.core.relaxed`.
        options: of the drafter, for example `window=7, ngram=5, guesses=7`; and of the engine, for example `n_ctx=8192`
            or `static="compiled"` (see `LlamaCppOptions`, `OpenVinoOptions` and `leapahead.models.loading.load`).

    Attributes:
        target: the loaded model.
        tokenizer: its tokenizer; None where there is none.
        eos_token_ids: the ids that end a text.
        inputs: turns prompts and options into token ids and parameters, and compiles grammars.
        drafter, drafter_name: the default drafter, and its name.
        engine: the engine that decodes.
        drafter_cache: what drafters keep between texts; None where nothing is kept.

    Raises:
        BadParameter: there is no such model, drafter or option, or a value is not possible.
        Refused: the model cannot be decoded, or lacks what the drafter or `exact` needs.
        LeapaheadError: a package is not installed.
    """

    def __init__(
        self,
        model: Any = None,
        *,
        engine: str = "auto",
        tokenizer: Tokenizer | str | Path | None = None,
        drafter: str | registry.DrafterClass = "auto",
        dtype: str = "auto",
        device: str = "auto",
        max_batch: int | None = None,
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
        together = 8 if max_batch is None else whole("max_batch", max_batch, 1, MOST_BATCH)
        self._chosen, self._acceptance = drafter, rule(acceptance) or EXACT
        backend = {name: options.pop(name) for name in loading.ENGINE_OPTIONS if name in options}
        backend |= {"engine": engine, "dtype": dtype, "device": device}
        self._networks = {} if head is None else {"head": trained_heads.lasting(head)}
        named = {} if draft is None else {"draft": names(draft)}
        if draft is None:  # which is loaded with them, too
            loading.check_loaded(model, dtype, device)
        check_spelling(options, drafter, OF_LLM)
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
        self.engine = Engine(self.target, tokenizer=self.tokenizer, max_batch=together, prefill_chunk=prefill_chunk)
        if draft is not None:
            cells = origin.of(self.target).get("cells", 0)
            self._networks["draft"] = given(draft, trust_remote_code=trust_remote_code, cells=cells, **backend)
        self.drafter = self.engine.drafter(drafter, **options, **self._networks)
        self.drafter_name = self.drafter.name
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
        try:
            self.engine.close()
        finally:
            loading.close(self.target)

    @overload
    def generate(self, prompt: Prompt, *, progress: bool | Told = False, **options: Unpack[OneText]) -> Result: ...

    @overload
    def generate(
        self, prompt: Prompts, *, progress: bool | Told = False, **options: Unpack[OneText]
    ) -> list[Result]: ...

    @overload
    def generate(
        self, prompt: Prompt, *, n: int, progress: bool | Told = False, **options: Unpack[OneText]
    ) -> list[Result]: ...

    @overload
    def generate(
        self, prompt: Prompts, *, n: int, progress: bool | Told = False, **options: Unpack[OneText]
    ) -> list[list[Result]]: ...

    def generate(self, prompt: Any, *, progress: bool | Told = False, **options: Unpack[Options]) -> Any:
        """Completes a prompt, or a list of prompts together. All options are keywords and may be left out.

        Logits are processed in the order of `SamplingParams`. An exception, such as Ctrl-C, cancels the requests.

        Args:
            prompt: text, token ids, or chat messages ({"role", "content"} each), which go through the tokenizer's chat
                template; or a list of those, and the results come in its order.
            progress: show a progress bar of the texts on standard error, if that is a terminal or a notebook; or a
                function that is called with the number of texts that are over and that of all, whenever one ends.
            max_new_tokens: greatest length of the text in tokens; 128 by default.
            temperature: 0, the default, is greedy; else at least 1e-6, and the text is a function of the seed.
            top_k: sample from the k likeliest tokens; 0, the default, for all.
            top_p: sample from the likeliest tokens whose probabilities add up to p; 1, the default, for all.
            min_p: sample from tokens at least so many times as likely as the likeliest; 0, the default, for all.
            repetition_penalty: of tokens in prompt or text, positive logits are divided by it and negative ones
                multiplied; 1, the default, is off.
            presence_penalty: subtracted from the logits of tokens that are in the text so far; 0 by default.
            frequency_penalty: subtracted as often as the token is in the text so far; 0 by default.
            logit_bias: token id -> number that is added to its logits in every step.
            bad_words: strings, token ids or sequences of token ids that must not appear. A string is banned as the
                tokenizer writes it at the beginning of a text and after a space.
            min_new_tokens: before so many no EOS and none of `stop_token_ids`; 0 by default. Strings of `stop` end the
                text before, too.
            seed: of the Gumbel noise, from 0 to 2**64 - 1: one for all prompts, or a list with one for each; by default
                one at random for each, which its result holds.
            n: number of samples of each prompt, which is read once. Sample i has the prompt's seed plus i (mod 2**64).
            logprobs: report the log-probability of every token, and of so many likeliest alternatives (0 for none):
                log-softmax of the model's unprocessed logits. None, the default, reports nothing.
            stop: a string or a list of strings that end the text, which then ends before them. Special tokens have no
                text; give their ids as `stop_token_ids`.
            stop_token_ids: ids that end the text; like EOS they are the last of its `tokens`.
            ignore_eos: go on after an EOS.
            include_stop: let the text end after the stop string.
            logits_processors: functions of your own, with Transformers' convention; see `LogitsProcessor`.
            criteria: functions of all token ids, prompt included, called after each new one; true ends the text.
            drafter: for this call, instead of the LLM's. It gets the LLM's `draft` and `head` if it takes them.
            drafter_options: name -> value: the drafter's options in this call, instead of those given to the LLM.
            prediction: what the text is expected to be: text or token ids, for all prompts, or a list with one (or
                None) for each. Wrong parts cost time, never text. A drafter that makes no use of it is refused.
            grammar: the form of the text, see `Grammar`; for all prompts, or a list with one (or None) for each.
            acceptance: for this call, instead of the LLM's.

        Returns:
            A `Result`, or a list of them for a list of prompts. With `n`, also with `n=1`, a list of n results in place
            of each.

        Raises:
            BadParameter: an unknown option, an impossible value, or an empty prompt.
            ContextOverflow: a prompt that leaves no room in the model's context.
            CacheFull: a request that does not fit the KV cache.
            Refused: the model cannot do what the drafter or an option needs.
            BadLogits: the logits are NaN, or every token is banned.
            Exception: what a processor, a criterion or a drafter of your own has raised.
        """
        single = is_single(prompt)
        requests = self.requests([prompt] if single else list(prompt), options)
        groups: list[list[Handle]] = []
        with shown(progress, sum(len(sampling) for _, sampling in requests)) as one_is_over:
            try:
                for request, sampling in requests:
                    groups.append(self.engine.submit_samples(request, sampling, one_is_over))
                self.engine.run([handle for group in groups for handle in group])
            finally:
                self.engine.cancel(*(handle for group in groups for handle in group))
        return self._results(groups, options, single)

    def _results(self, groups: list[list[Handle]], options: Options, single: bool) -> Any:
        handles = [handle for group in groups for handle in group]
        for handle in sorted(handles, key=lambda each: each.error is None):  # for which the others were cancelled
            check(handle)
        results = [[self.writer(options).result(handle) for handle in group] for group in groups]
        found = results if "n" in options else [group[0] for group in results]
        return found[0] if single else found

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Generator[Piece, None, None]:
        """Completes one prompt, piece by piece as the steps go.

        Arguments and errors are those of `generate`, without lists of prompts and `n`.

        Yields:
            A `Piece` per step, the last one with the whole `Result`. While a piece is not taken, the request is not
            stepped. Closing the generator ends the text there.
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
        check_names(options, OF_LLM)
        drafter = self.drafter
        if "drafter" in options or "drafter_options" in options:
            chosen, given = options.get("drafter", self._chosen), drafter_options(options)
            registry.check_options(kind := registry.kind_of(chosen), given)
            known = registry.options(kind)
            given = {name: each for name, each in self._networks.items() if name in known} | given
            drafter = self.engine.drafter(chosen, **given)
        predictions = self.inputs.predictions(options.get("prediction"), len(prompts), drafter)
        samples = whole("n", options.get("n", 1), 1, MOST_SAMPLES)
        all_seeds = seeds(options.get("seed"), len(prompts), samples, options.get("temperature", 0.0) != 0)
        stop = self.inputs.stop(options)
        grammars = self.inputs.grammar(options, len(prompts))
        params = self.inputs.sampling(options)
        found = []
        for prompt, own_seeds, prediction, form in zip(prompts, all_seeds, predictions, grammars, strict=True):
            sampling = [params.of(seed, form) for seed in own_seeds]
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


OF_LLM = tuple(name for name in signature(LLM).parameters if name != "options")
