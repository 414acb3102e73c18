"""What vLLM knows of requests, in plain types; and the requests of a batch by their texts where no ids are told."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from leapahead.core.errors import first_line
from leapahead.core.parameters import is_whole
from leapahead.core.text import Tokenizer
from leapahead.integrations.vllm.batch import Batch, Request

KEPT = 256  # steps for which a text that is in no batch is kept, where vLLM tells no ids


class Descriptions:
    """Describes requests by their id.

    Args:
        vllm_config: of vLLM.
        sampled: whether requests with a temperature may be drafted for.
        log: for what is said once.

    Attributes:
        requests: vLLM's own records by id; set in every step.
    """

    def __init__(self, vllm_config: Any, sampled: bool, log: logging.Logger) -> None:
        self.requests: Mapping[str, Any] = {}
        self._model, self._sampled, self._log = vllm_config.model_config, sampled, log
        self._vocab_size = int(self._model.get_vocab_size())
        self._tokenizer: Tokenizer | None = None
        self._said: set[str] = set()

    def __call__(self, name: str) -> Request:
        found = self.requests.get(name)
        if found is None:
            return Request()
        prompt, params = int(found.num_prompt_tokens), found.sampling_params
        if params is None:
            return Request(prompt, drafts=False)
        temperature = float(params.temperature or 0.0)
        longest = prompt + params.max_tokens if params.max_tokens is not None else 1 << 30
        drafts = self._sampled or temperature == 0.0
        if not drafts:
            self._say(
                "requests with a temperature are decoded without drafts on this CPU, where this vLLM's rejection "
                "sampler reads uninitialised memory (vLLM issue 55005); greedy requests are drafted for"
            )
        prediction = self._prediction((params.extra_args or {}).get("prediction")) if drafts else ()
        return Request(prompt, longest, temperature, prediction, drafts)

    def _prediction(self, given: Any) -> tuple[int, ...]:
        """The token ids of a prediction; none, and a warning, where they cannot be had."""
        if given is None or given == "":
            return ()
        if isinstance(given, str):
            try:
                tokenizer = self.tokenizer()
                given = None if tokenizer is None else tokenizer.encode(given, add_special_tokens=False)
            except Exception as error:  # of any tokenizer; drafting must not fail for all because of one request
                self._say(f"a prediction cannot be divided into tokens ({first_line(error)}); it is not used")
                return ()
            if given is None:
                self._say("a prediction is text, and vLLM was started without a tokenizer; send token ids")
                return ()
        if not isinstance(given, Sequence) or not all(map(is_whole, given)):
            self._say(f"a prediction is {str(given)[:60]!r}, but must be text or token ids; it is not used")
            return ()
        tokens = tuple(map(int, given))
        if tokens and not 0 <= min(tokens) <= max(tokens) < self._vocab_size:
            self._say(f"a prediction has a token id outside the vocabulary of {self._vocab_size}; it is not used")
            return ()
        return tokens

    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None where vLLM was started without."""
        if self._tokenizer is None:
            self._tokenizer = tokenizer_of(self._model)
        return self._tokenizer

    def _say(self, what: str) -> None:
        """Logs a sentence, once."""
        if what not in self._said:
            self._said.add(what)
            self._log.warning("leapahead: %s", what)


def tokenizer_of(model_config: Any) -> Tokenizer | None:
    """vLLM's tokenizer of a model; None where it was told to use none."""
    if model_config.skip_tokenizer_init:
        return None
    found: Tokenizer | None = import_module("vllm.tokenizers.registry").cached_tokenizer_from_config(model_config)
    return found


class ByText:
    """Names the requests of a batch by their texts, where vLLM tells no ids.

    A request keeps its name while its row has the text that was last seen there, or another row has it. Requests of
    equal texts are told apart by nothing, and need not be.
    """

    def __init__(self) -> None:
        self._texts: dict[str, list[int]] = {}  # name -> committed tokens
        self._seen: dict[str, int] = {}  # name -> the step in which it was in a batch last
        self._rows: list[str] = []
        self._step = self._made = 0

    def batch(self, new: Sequence[Sequence[int]], lengths: Any, texts: Any, describe: Descriptions) -> Batch:
        """The batch of a step."""
        self._step += 1
        free = set(self._texts)
        names = []
        for row, tokens in enumerate(new):
            held = texts[row, : int(lengths[row]) - len(tokens)].tolist() if tokens else None
            former = self._rows[row] if row < len(self._rows) else ""
            name = former if held is not None and former in free and self._texts[former] == held else ""
            if not name and held is not None:
                name = next((each for each in free if self._texts[each] == held), "")
            if not name:
                self._made += 1
                name = f"text {self._made}"
            free.discard(name)
            names.append(name)
            if held is not None:
                self._texts[name] = [*held, *tokens]
                self._seen[name] = self._step
        for name in [name for name, seen in self._seen.items() if self._step - seen > KEPT]:
            del self._texts[name], self._seen[name]
        self._rows = names
        return Batch(names, new, lengths, texts, self._texts, describe)
