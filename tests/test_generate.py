"""`LLM`: prompts of every shape, batches, streaming, stops, and one clear sentence for whatever is wrong."""

from __future__ import annotations

import os
import pickle
import random
import re
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from time import process_time
from types import SimpleNamespace
from typing import Any, ClassVar, get_overloads, get_type_hints

import numpy as np
import pytest
from helpers import is_freed, mostly_slow, with_gaps

import leapahead
from leapahead import (
    LLM,
    AsyncLLM,
    BadParameter,
    ContextOverflow,
    LeapaheadError,
    PrefixFree,
    Proposal,
    Refused,
    SequenceDrafter,
    SequenceView,
    drafters,
)
from leapahead.chat.markers import WithMarkers
from leapahead.core.text import Detokenizer, TextStream, id_bound
from leapahead.core.tree import Budget, TokenTree
from leapahead.models import loading
from leapahead.models.toy import ToyTarget

NAMES = drafters.ready()


class SyllableTokenizer:
    """Token i of the toy target is a syllable; token 9 is special and 11 has none."""

    SYLLABLES: ClassVar = ["ab", "ba", " ", "c", "ca", "bc", ".\n", "aa", "b", "<eos>", "cab"]
    eos_token_id: int | None = None
    chat_template = None

    def __len__(self) -> int:
        return len(self.SYLLABLES)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        tokens = []
        while text:
            found = max((s for s in self.SYLLABLES if text.startswith(s)), key=len)
            tokens.append(self.SYLLABLES.index(found))
            text = text[len(found) :]
        return tokens

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(self.SYLLABLES[t] for t in token_ids if not (skip_special_tokens and t == 9))

    def apply_chat_template(self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool, **_: Any) -> str:
        raise ValueError("no template")


@pytest.fixture
def toy() -> LLM:
    """The default drafter, told to draft: it would not where a forward takes no time."""
    return LLM(ToyTarget(), tokenizer=SyllableTokenizer(), nodes=8)


def test_progress_is_told_whenever_a_text_is_over(toy: LLM) -> None:
    told: list[tuple[int, int]] = []
    plain = toy.generate([[1, 2], [3, 4], [5]], max_new_tokens=6, n=2)
    texts = toy.generate([[1, 2], [3, 4], [5]], max_new_tokens=6, n=2, progress=lambda *counts: told.append(counts))
    assert told == [(done, 6) for done in range(1, 7)]
    assert [[each.tokens for each in some] for some in texts] == [[each.tokens for each in some] for some in plain]


def test_progress_is_told_once_of_each_text_after_an_interrupt(toy: LLM) -> None:
    def interrupt(tokens: Sequence[int]) -> bool:
        raise KeyboardInterrupt

    told: list[tuple[int, int]] = []
    with pytest.raises(KeyboardInterrupt):
        toy.generate([[1, 2]] * 12, criteria=[interrupt], progress=lambda *counts: told.append(counts))
    assert told == [(done, 12) for done in range(1, 13)]


def test_a_progress_bar(toy: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    toy.generate([[1, 2], [3, 4]], max_new_tokens=6, progress=True)
    assert capsys.readouterr() == ("", ""), "standard error is no terminal"
    monkeypatch.setenv("FORCE_COLOR", "1")  # as one is, for rich
    monkeypatch.setenv("TERM", "xterm")
    toy.generate([[1, 2], [3, 4]], max_new_tokens=6, progress=True)
    output, errors = capsys.readouterr()
    assert output == ""
    assert "decoding" in errors
    assert "2/2" in errors


def test_a_progress_that_cannot_be_told(toy: LLM) -> None:
    with pytest.raises(BadParameter, match="progress='bar' is not possible: it must be True, False or a function"):
        toy.generate([[1, 2]], progress="bar")

    def broken(done: int, total: int) -> None:
        raise OSError("nobody listens")

    with pytest.raises(OSError, match="nobody listens"):
        toy.generate([[1, 2], [3]], progress=broken)
    assert toy.generate([1, 2], max_new_tokens=2).tokens


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


# ------------------------------------------------------------------------------------------------------- imports


def test_the_import_pulls_in_no_backend() -> None:
    code = "import sys, leapahead, leapahead.cli; leapahead.LLM; print({'torch', 'transformers'} & set(sys.modules))"
    assert run_python(code).stdout == "set()\n"


@pytest.mark.slow
def test_without_torch_there_is_one_sentence() -> None:
    code = "import sys; sys.modules['torch'] = None; import leapahead; leapahead.LLM('some/model')"
    assert 'which is not installed: pip install "leapahead[transformers]"' in run_python(code).stderr


@pytest.mark.slow
@pytest.mark.parametrize(("package", "engine"), [("llama_cpp", "auto"), ("openvino", "openvino")])
def test_a_missing_file_is_named_before_a_missing_package(package: str, engine: str) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; from leapahead import LLM; LLM('no.gguf', engine={engine!r})"
    assert "there is no file 'no.gguf'" in run_python(code).stderr


def test_hugging_face_is_imported_when_asked_for() -> None:
    assert leapahead.hf.__name__ == "leapahead.integrations.hf"
    with pytest.raises(AttributeError):
        leapahead.nothing  # noqa: B018


@pytest.mark.parametrize("name", leapahead.__all__)
def test_public_names_are_there(name: str) -> None:
    assert getattr(leapahead, name) is not None


# ---------------------------------------------------------------------------------------------------------- text


@pytest.mark.parametrize("drafter", NAMES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_drafter_gives_plain_text(drafter: str, temperature: float) -> None:
    target, tokenizer = ToyTarget(), SyllableTokenizer()
    options: dict[str, Any] = {"max_new_tokens": 60, "temperature": temperature, "seed": 3}
    plain = LLM(target, tokenizer=tokenizer, drafter="plain").generate("ab ba", **options)
    llm = LLM(target, tokenizer=tokenizer, drafter=drafter)
    result = llm.generate("ab ba", **options)
    assert (result.tokens, result.text, result.finish_reason) == (plain.tokens, plain.text, "length")
    assert len(result.tokens) == len(result.drafted) == result.stats.committed == 60
    assert sum(result.drafted) == result.stats.accepted
    assert result.prompt_tokens == tokenizer.encode("ab ba")
    assert result.seed == 3
    assert llm.generate("ab ba", drafter="plain", **options).tokens == plain.tokens


def test_ids_without_text_add_none(toy: LLM) -> None:
    tokens = toy.generate([1, 2, 3], max_new_tokens=80).tokens
    assert 11 in tokens
    known = [token for token in tokens if token < 11]
    assert toy.generate([1, 2, 3], max_new_tokens=80).text == toy.tokenizer.decode(known, skip_special_tokens=True)


def test_a_stream_is_the_result_in_pieces(toy: LLM) -> None:
    pieces = list(toy.stream("ab", max_new_tokens=50))
    result = pieces[-1].result
    assert result is not None
    assert result.tokens == toy.generate("ab", max_new_tokens=50).tokens
    assert "".join(piece.text for piece in pieces) == result.text
    assert [token for piece in pieces for token in piece.tokens] == result.tokens
    assert [i < p.drafted for p in pieces for i in range(len(p.tokens))] == result.drafted
    assert all("".join(text for text, _ in piece.spans) == piece.text for piece in pieces)
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert any(drafted for piece in pieces for _, drafted in piece.spans)


def test_an_abandoned_stream_closes_its_session(toy: LLM) -> None:
    opened: list[Any] = []
    original = toy.target.open
    toy.target.open = lambda *args, **rest: opened.append(original(*args, **rest)) or opened[-1]  # type: ignore
    stream = toy.stream("ab", max_new_tokens=50)
    next(stream)
    stream.close()
    assert opened[-1].cache == []


def test_without_a_tokenizer_prompts_are_tokens() -> None:
    result = LLM(ToyTarget()).generate(np.array([1, 2, 3]), max_new_tokens=5)
    assert (len(result.tokens), result.text, result.prompt_tokens) == (5, "", [1, 2, 3])


# --------------------------------------------------------------------------------------------------------- batch


@pytest.mark.parametrize("max_batch", [1, 2, 8])
def test_a_batch_gives_each_prompt_its_own_text(max_batch: int) -> None:
    llm = LLM(ToyTarget(), tokenizer=SyllableTokenizer(), max_batch=max_batch)
    prompts = ["ab", [1, 2, 3], "ba ab", [4], "cab.\nab", [5, 5], "aa"]
    options: dict[str, Any] = {"max_new_tokens": 30, "temperature": 0.8, "seed": list(range(7)), "stop": ["cab"]}
    widths = []
    original = llm.target.step
    llm.target.step = lambda s, *rest, **more: widths.append(len(s)) or original(s, *rest, **more)  # type: ignore
    together = llm.generate(prompts, **options)
    assert max(widths) == min(max_batch, len(prompts))
    alone = [llm.generate(p, **{**options, "seed": seed}) for seed, p in enumerate(prompts)]
    assert [r.tokens for r in together] == [r.tokens for r in alone]
    assert [r.text for r in together] == [r.text for r in alone]
    assert len({len(r.tokens) for r in together}) > 1  # they joined and left


def test_seeds(toy: LLM) -> None:
    options: dict[str, Any] = {"max_new_tokens": 20, "temperature": 1.5}
    one, other = toy.generate(["ab", "ab"], **options)
    assert one.seed != other.seed
    assert toy.generate("ab", seed=one.seed, **options).tokens == one.tokens
    same = toy.generate(["ab", "ab"], seed=5, **options)
    assert same[0].tokens == same[1].tokens
    assert toy.generate("ab").seed == 0


# --------------------------------------------------------------------------------------------------------- stops


@pytest.mark.parametrize("drafter", NAMES)
@pytest.mark.parametrize("stop", mostly_slow(["b", "ac", "a a", "caba", "b."], "ac"))
def test_stop_strings(drafter: str, stop: str) -> None:
    llm = LLM(ToyTarget(sharpness=0.5), tokenizer=SyllableTokenizer(), drafter=drafter)
    options: dict[str, Any] = {"max_new_tokens": 300, "temperature": 1.0, "seed": 11}
    whole = llm.generate("ab", **options)
    result = llm.generate("ab", stop=stop, **options)
    assert stop in whole.text
    assert result.text == whole.text[: whole.text.index(stop)]
    assert (result.finish_reason, result.stop_reason) == ("stop", stop)
    assert result.tokens == whole.tokens[: len(result.tokens)]
    *before, _ = result.tokens
    decode = lambda tokens: llm.tokenizer.decode([t for t in tokens if t < 11], skip_special_tokens=True)  # noqa: E731
    assert stop in decode(result.tokens)
    assert stop not in decode(before)
    included = llm.generate("ab", stop=[stop], include_stop=True, **options)
    assert included.text == result.text + stop
    pieces = list(llm.stream("ab", stop=stop, **options))
    assert "".join(piece.text for piece in pieces) == result.text


def test_text_that_may_begin_a_stop_is_held_back() -> None:
    stream = TextStream(SyllableTokenizer(), ["bca"])
    shown = []
    for token in (0, 3, 2, 8):  # ab, c, space, b
        stream.add(token, False)
        shown.append("".join(text for text, _ in stream.take()))
    assert shown == ["a", "", "bc ", ""]
    assert stream.finish(None) == (("b", False),)


def test_of_many_stop_strings_few_are_looked_at() -> None:
    class Watched(str):
        looks = 0

        def startswith(self, *given: Any) -> bool:
            Watched.looks += 1
            return super().startswith(*given)

    stream = TextStream(SyllableTokenizer(), [Watched(f"{first}ca{number}") for number in range(500) for first in "zb"])
    shown = []
    for token in (0, 3, 2, 8):  # ab, c, space, b
        stream.add(token, False)
        shown.append("".join(text for text, _ in stream.take()))
    assert shown == ["a", "", "bc ", ""]
    assert stream.finish(None) == (("b", False),)
    assert Watched.looks < 20


def test_a_long_text_that_is_read_at_its_end_takes_time_in_its_length() -> None:
    class Lines(SyllableTokenizer):
        def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
            return "x" * 200 * len(token_ids)

    stream, began = TextStream(Lines()), process_time()
    for _ in range(20_000):
        stream.add(1, False)
    assert stream.finish(None) == (("x" * 4_000_000, False),)
    assert process_time() - began < 2.0  # about 0.1; more than 10 where the text is copied for every token


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("tokens", "stop", "expected"), [("a!b", "ab", "a!b"), ("a!bc!", "!", "a!bc")])
def test_special_tokens_that_are_shown_lose_no_text(tokens: str, stop: str, expected: str, streamed: bool) -> None:
    """Texts with tool calls have them; the text in which the engine found the stop string has not."""

    class Characters(SyllableTokenizer):
        def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
            return "".join(map(chr, token_ids))

        def __len__(self) -> int:
            return 256

    stream, found = TextStream(Characters(), [stop]), ""
    for token in map(ord, tokens):
        stream.add(token, False)
        found += "".join(text for text, _ in (stream.take() if streamed and token != ord(tokens[-1]) else ()))
    assert found + "".join(text for text, _ in stream.finish(stop)) == expected


def test_eos_stop_tokens_and_minimum(toy: LLM) -> None:
    whole = toy.generate([1, 2, 3], max_new_tokens=40).tokens
    token = whole[10]
    first = whole.index(token)
    stopped = toy.generate([1, 2, 3], max_new_tokens=40, stop_token_ids=[token])
    assert (stopped.tokens, stopped.finish_reason, stopped.stop_reason) == (whole[: first + 1], "stop", token)
    tokenizer = SyllableTokenizer()
    tokenizer.eos_token_id = token
    ending = LLM(ToyTarget(), tokenizer=tokenizer, nodes=8)
    ended = ending.generate([1, 2, 3], max_new_tokens=40)
    assert (ended.tokens, ended.finish_reason, ended.stop_reason) == (whole[: first + 1], "stop", None)
    assert ending.generate([1, 2, 3], max_new_tokens=40, ignore_eos=True).tokens == whole
    later = ending.generate([1, 2, 3], max_new_tokens=40, min_new_tokens=20).tokens
    assert token not in later[:20]


@pytest.mark.parametrize(
    ("word", "banned"), [("ab", ["ab", " ab"]), ("  ab", ["  ab", " ab"]), ("\nab", ["\nab", " \nab"])]
)
def test_a_bad_word_is_banned_as_it_is_written_and_after_a_space(
    toy: LLM, monkeypatch: pytest.MonkeyPatch, word: str, banned: list[str]
) -> None:
    monkeypatch.setattr(SyllableTokenizer, "SYLLABLES", [*SyllableTokenizer.SYLLABLES, "\n"])
    encode = SyllableTokenizer().encode
    assert toy.inputs.sampling({"bad_words": [word]}).bad_words == tuple(tuple(encode(b)) for b in banned)


def test_what_all_texts_of_a_call_share_is_made_once() -> None:
    class Counting(SyllableTokenizer):
        encoded = 0

        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            self.encoded += 1
            return super().encode(text, add_special_tokens=add_special_tokens)

    tokenizer = Counting()
    llm = LLM(ToyTarget(), tokenizer=tokenizer, drafter="plain", drafter_cache=False)
    options: Any = {"bad_words": ["ab", "c"], "logit_bias": {3: 1.0}, "n": 5, "temperature": 1.0, "seed": [1, 2]}
    requests = llm.requests([[1], [2]], options)
    params = [each for _, some in requests for each in some]
    assert tokenizer.encoded == 4
    assert len({id(each.bad_words) for each in params}) == len({id(each.processors) for each in params}) == 1
    assert [each.seed for each in params] == [1, 2, 3, 4, 5, 2, 3, 4, 5, 6]


def test_bad_words_and_processors(toy: LLM) -> None:
    whole = toy.generate([1, 2, 3], max_new_tokens=30).tokens
    banned = whole[0]
    assert banned not in toy.generate([1, 2, 3], max_new_tokens=30, bad_words=[banned]).tokens
    word = SyllableTokenizer.SYLLABLES[whole[0]]
    assert whole[0] not in toy.generate([1, 2, 3], max_new_tokens=30, bad_words=word).tokens

    def only_three(prefixes: Any, logits: Any) -> Any:
        logits[:, :3] = -np.inf
        return logits

    assert min(toy.generate([1, 2, 3], max_new_tokens=30, logits_processors=[only_three]).tokens) >= 3
    seen = toy.generate([1, 2, 3], max_new_tokens=30, criteria=[lambda tokens: len(tokens) == 9])
    assert (len(seen.tokens), seen.finish_reason) == (6, "stop")


def test_the_context_ends_a_text() -> None:
    result = LLM(ToyTarget(context_length=20)).generate([1, 2, 3], max_new_tokens=100)
    assert (len(result.tokens), result.finish_reason) == (17, "length")


# ------------------------------------------------------------------------------------------------- detokenising


def byte_fallback() -> Any:
    """A SentencePiece-like tokenizer: a leading space is stripped, unknown characters are bytes."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁hello", "▁a", "b", "▁", "日"]
    bpe = Tokenizer(
        models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    bpe.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="</s>", unk_token="<unk>")


def assert_whole(tokenizer: Any, tokens: list[int]) -> None:
    detokenizer = Detokenizer(tokenizer)
    text = "".join(detokenizer.add(token) for token in tokens) + detokenizer.flush()
    assert text == tokenizer.decode(tokens, skip_special_tokens=True)


def test_text_comes_token_by_token(tokenizer: Any) -> None:
    rng = random.Random(0)
    for _ in range(300):
        count = rng.choice([3, 20, 100])
        kind = rng.random()
        if kind < 0.4:
            tokens = [rng.randrange(330) for _ in range(count)]
        elif kind < 0.6:
            tokens = [rng.randrange(100, 256) for _ in range(count)]  # bytes that are mostly no text
        else:
            tokens = tokenizer.encode(
                "".join(rng.choice(["€", "ü", "😀", "a", " hello", "日本"]) for _ in range(count))
            )
        assert_whole(tokenizer, tokens)


def test_text_comes_token_by_token_from_bytes_and_after_spaces() -> None:
    tokenizer, rng = byte_fallback(), random.Random(0)
    for _ in range(300):
        tokens: list[int] = []
        for _ in range(rng.choice([3, 20, 60])):
            kind = rng.random()
            if kind < 0.2:
                tokens += [2 + byte for byte in rng.choice(["€", "😀", "ü"]).encode()]
            else:
                tokens.append(1 if kind < 0.3 else 5000 if kind < 0.35 else rng.randrange(258, 263))
        assert_whole(tokenizer, tokens)


@pytest.mark.parametrize("last", ["▁hello", "b", "日"])
def test_a_text_keeps_the_space_that_divides_it_from_its_prompt(last: str) -> None:
    tokenizer, rng = byte_fallback(), random.Random(0)
    for _ in range(50):
        tokens = [[rng.randrange(258, 263) for _ in range(rng.randrange(1, 20))] for _ in "pt"]
        prompt = [*tokens[0], tokenizer.convert_tokens_to_ids(last)]
        detokenizer = Detokenizer(tokenizer, before=prompt)
        text = "".join(map(detokenizer.add, tokens[1])) + detokenizer.flush()
        assert tokenizer.decode(prompt) + text == tokenizer.decode(prompt + tokens[1])


@pytest.mark.parametrize("before", [[1], [1, 5000], [1, 2 + 0xE6]])  # nothing that is text, half a character
def test_a_text_that_follows_no_text_stands_for_itself(before: list[int]) -> None:
    tokenizer = byte_fallback()
    detokenizer = Detokenizer(tokenizer, before=before)
    tokens = tokenizer.convert_tokens_to_ids(["▁hello", "▁a"])
    assert "".join(map(detokenizer.add, tokens)) + detokenizer.flush() == "hello a"


def test_a_text_begins_with_its_space_in_results_streams_and_stop_strings() -> None:
    class Stripping(SyllableTokenizer):
        """Leaves out the space with which a text begins, as SentencePiece does."""

        def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
            return super().decode(token_ids, skip_special_tokens=skip_special_tokens).removeprefix(" ")

    llm = LLM(ToyTarget(), tokenizer=Stripping(), nodes=8)
    options: dict[str, Any] = {"max_new_tokens": 3, "logit_bias": {2: 99.0}}
    assert llm.generate("ab", **options).text == "".join(piece.text for piece in llm.stream("ab", **options)) == "   "
    assert llm.generate("ab", stop=" ", **options).tokens == [2]


def test_tokens_behind_a_gap_of_the_ids_have_their_text() -> None:
    tokenizer = with_gaps()
    assert Detokenizer(tokenizer).add(9) == tokenizer.decode([9]) == "<x>"
    assert Detokenizer(tokenizer).add(10) == ""
    assert len(WithMarkers(tokenizer, [])) == 10
    llm = LLM(ToyTarget(), tokenizer=tokenizer)
    result = llm.generate([0], stop="<x>", logit_bias={9: 99.0}, max_new_tokens=4)
    assert (result.tokens, result.stop_reason) == ([9], "<x>")


def test_the_ids_of_a_tokenizer_are_looked_at_once_and_when_tokens_were_added() -> None:
    class Slotted:
        __slots__ = ("looks", "vocabulary")

        def __init__(self) -> None:
            self.looks, self.vocabulary = 0, {"a": 0, "b": 9}

        def __len__(self) -> int:
            return len(self.vocabulary)

        def get_vocab(self) -> dict[str, int]:
            self.looks += 1
            return self.vocabulary

    class Referenced(Slotted):
        __slots__ = ("__weakref__",)

    for kind, looks in ((Referenced, 2), (Slotted, 3)):  # the latter cannot be kept
        tokenizer: Any = kind()
        assert [id_bound(tokenizer), id_bound(tokenizer)] == [10, 10]
        tokenizer.vocabulary["c"] = 20
        assert id_bound(tokenizer) == 21
        assert tokenizer.looks == looks


def test_a_token_costs_the_same_in_a_long_text(tokenizer: Any) -> None:
    longest = 0

    class Counting:
        def __len__(self) -> int:
            return len(tokenizer)

        def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
            nonlocal longest
            longest = max(longest, len(token_ids))
            return str(tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    rng = random.Random(1)
    detokenizer = Detokenizer(Counting())  # type: ignore[arg-type]
    for _ in range(2000):
        detokenizer.add(rng.choice([0, rng.randrange(256)]))
    assert longest <= Detokenizer.WINDOW + 1


# ------------------------------------------------------------------------------------------------- Transformers


@pytest.fixture(scope="module")
def llm(tiny_folder: Path) -> LLM:
    return LLM(str(tiny_folder))


def test_a_folder(llm: LLM) -> None:
    result = llm.generate("def add(a, b):", max_new_tokens=40, ignore_eos=True)
    assert result.text == llm.tokenizer.decode(result.tokens, skip_special_tokens=True)
    assert result.tokens == llm.generate("def add(a, b):", max_new_tokens=40, ignore_eos=True, drafter="plain").tokens


def test_the_tokens_of_transformers(llm: LLM, tiny_model: Any) -> None:
    import torch

    for prompt in ("def add(a, b):", "The quick"):
        ids = torch.tensor([llm.tokenizer.encode(prompt)])
        expected = tiny_model.generate(ids, do_sample=False, max_new_tokens=40, pad_token_id=0)[0, ids.shape[1] :]
        assert llm.generate(prompt, max_new_tokens=40).tokens == expected.tolist()


def test_chat_messages_are_unicode(llm: LLM) -> None:
    with pytest.raises(BadParameter, match="the chat holds a lone surrogate"):
        llm.generate([{"role": "user", "content": "\udc80"}], max_new_tokens=4)


def test_parts_of_a_content_are_no_python_in_the_prompt(llm: LLM) -> None:
    with pytest.raises(BadParameter, match="takes no lists of parts; give the content of each message as text"):
        llm.generate([{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], max_new_tokens=4)


def test_texts_for_a_template_that_reads_parts_only(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that a template of texts writes in another way is left as it is."""
    parts = "{% for m in messages %}{% for p in m.content if p.type == 'text' %}[{{ p.text }}]{% endfor %}{% endfor %}"
    of_text = "{% for m in messages %}{{ m.content if m.content is not string else m.content | upper }}{% endfor %}"
    strings_only = "{% for m in messages %}{{ m.content.split('.')[1] }}{% endfor %}"
    for template, content, text in ((parts, "a.b", "[a.b]"), (of_text, "a.b", "A.B"), (strings_only, "a.b", "b")):
        monkeypatch.setattr(llm.tokenizer, "chat_template", template)
        messages = [{"role": "user", "content": content}]
        expected = llm.tokenizer.encode(text, add_special_tokens=False)
        assert llm.generate(messages, max_new_tokens=1).prompt_tokens == expected
        assert messages == [{"role": "user", "content": content}]


def test_chat_messages(llm: LLM) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = "<system>Be brief.<user>Hi<assistant>"
    (result,) = llm.generate([messages], max_new_tokens=3)
    assert result.prompt_tokens == llm.tokenizer.encode(text, add_special_tokens=False)
    assert llm.generate(messages, max_new_tokens=3).tokens == result.tokens
    with pytest.raises(BadParameter, match="the chat template does not take these messages: unknown role"):
        llm.generate([{"role": "wizard", "content": "Hi"}])


def test_chat_messages_without_what_templates_need(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def as_transformers(*args: Any, **options: Any) -> str:
        raise ImportError("apply_chat_template requires jinja2>=3.1.6 to be installed")

    monkeypatch.setattr(llm.tokenizer, "apply_chat_template", as_transformers)
    with pytest.raises(BadParameter, match=r"chat templates cannot be used: apply_chat_template requires jinja2>=3\.1"):
        llm.generate([{"role": "user", "content": "Hi"}], max_new_tokens=3)


def test_a_loaded_model(tiny_model: Any, tokenizer: Any) -> None:
    llm = LLM(tiny_model)
    assert llm.tokenizer is None
    assert llm.generate([5, 6, 7], max_new_tokens=4).text == ""
    assert LLM(tiny_model, tokenizer=tokenizer).generate("ab", max_new_tokens=4).text


def test_eos_by_anyones_word(tiny_folder: Path, tokenizer: Any) -> None:
    loaded = loading.load(str(tiny_folder))
    assert loaded.eos_token_ids == (0,)  # an id like any other
    model: Any = loaded.target.model  # type: ignore[attr-defined]
    model.generation_config.eos_token_id = [7, 5, 10_000]
    model.config.eos_token_id = 3
    assert set(loading.eos_token_ids(loaded.target, tokenizer)) == {0, 3, 5, 7}
    assert set(loading.eos_token_ids(loaded.target, None)) == {3, 5, 7}


def test_tokens_that_a_generation_config_suppresses_are_not_written(tiny_folder: Path) -> None:
    model: Any = loading.load(str(tiny_folder)).target.model  # type: ignore[attr-defined]
    prompt: list[int] = [5, 6, 7]
    free = LLM(model).generate(prompt, max_new_tokens=8, ignore_eos=True).tokens
    model.generation_config.suppress_tokens = [free[0], free[3], 10_000]
    suppressing = LLM(model)
    found = suppressing.generate(prompt, max_new_tokens=8, ignore_eos=True).tokens
    assert not set(free[:4:3]) & set(found)
    assert suppressing.generate(prompt, max_new_tokens=8, ignore_eos=True, drafter="plain").tokens == found


@pytest.mark.parametrize("kind", [str, Path])
def test_a_tokenizer_by_name(tiny_folder: Path, tmp_path: Path, kind: type[str | Path]) -> None:
    assert LLM(ToyTarget(), tokenizer=kind(tiny_folder)).tokenizer is not None
    with pytest.raises(BadParameter, match=r"has no tokenizer_config.json, so it is not a tokenizer"):
        LLM(ToyTarget(), tokenizer=kind(tmp_path))


def test_a_wrong_tokenizer_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    for wrong, says in (
        (tmp_path / "missing", "there is no folder"),
        (Tokenizer(models.BPE()), "a tokenizer must be a loaded one, .*, or its name or folder, got Tokenizer"),
        (5, "a tokenizer must be .*, got int"),
    ):
        with pytest.raises(BadParameter, match=says):
            LLM(str(tmp_path), tokenizer=wrong)  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------------------------- bad input


class Chains(SequenceDrafter):
    """Needs what no target has."""

    name = "impossible"
    needs = frozenset({"telepathy"})

    def propose(self, sequence: SequenceView, budget: Budget) -> Proposal:
        return Proposal(TokenTree.root(sequence.root))


class Changing:
    """A logits processor that forgets to return what it changed."""

    def __call__(self, prefixes: Any, logits: Any) -> None:
        logits[:, 0] = 0.0


class Nameless(SequenceDrafter):
    def propose(self, sequence: SequenceView, budget: Budget) -> Proposal:
        return Proposal(TokenTree.root(sequence.root))


class Silent(SequenceDrafter):
    name = "silent"

    def propose(self, sequence: SequenceView, budget: Budget) -> Proposal:
        return None  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("prompt", "options", "sentence"),
    [
        ("", {}, "the prompt is empty"),
        ([], {}, "the prompt is empty"),
        (["ab", ""], {}, "the prompt is empty"),
        ([[1], []], {}, "the prompt is empty"),
        (None, {}, "a prompt must be text, a list of token ids or chat messages, got NoneType"),
        (7, {}, "got int"),
        (b"ab", {}, "got bytes"),
        (["ab", None], {}, "got NoneType"),
        ([1, "ab"], {}, "a list of token ids must hold whole numbers only"),
        ([1.5], {}, "got float"),
        (np.array([1.5]), {}, "got float"),
        ([[["ab"]]], {}, "further lists"),
        ([1, 2, 99], {}, "token id 99 is outside the vocabulary of 12$"),
        ([-1], {}, "token id -1 is outside"),
        ([{"role": "user"}], {}, "a chat message is"),
        ([{"content": "x"}], {}, "a chat message is"),
        ([{"role": "user", "content": "x"}, "ab"], {}, "a chat message is"),
        ([{"role": "user", "content": "x"}], {}, "no chat template; give the prompt as text .`leapahead generate` wi"),
        ("ab", {"max_new_tokens": 0}, "max_new_tokens=0 is not possible: it must be a whole number of at least 1"),
        ("ab", {"max_new_tokens": 1.5}, "max_new_tokens=1.5 is not possible"),
        ("ab", {"max_tokens": 5}, r"no option 'max_tokens' \(did you mean 'max_new_tokens'\?\)"),
        ("ab", {"temperature": -1}, "temperature=-1 is not possible"),
        ("ab", {"temperature": "hot"}, "temperature='hot' is not possible"),
        ("ab", {"seed": -1}, "seed=-1 is not possible"),
        ("ab", {"seed": [1, 2]}, "one whole number, or a list of 1"),
        ("ab", {"seed": "x"}, "seed='x' is not possible"),
        ("ab", {"stop": ""}, "an empty stop string"),
        ("ab", {"stop": [3]}, "a string or a list of strings"),
        ("ab", {"stop_token_ids": [99]}, "stop_token_ids has 99, which is outside"),
        ("ab", {"stop_token_ids": "x"}, "must consist of token ids"),
        ("ab", {"bad_words": [[99]]}, "bad_words has 99"),
        ("ab", {"bad_words": [" "]}, "an empty bad word"),
        ("ab", {"bad_words": ["\n"]}, "of white space alone"),
        ("ab", {"drafter": "nothing"}, "there is no drafter 'nothing'"),
        ("ab", {"drafter": 7}, "a drafter must be a name or a class, got 7"),
        ("ab", {"drafter": ["auto"]}, r"a drafter must be a name or a class, got \['auto'\]"),
        ("ab", {"drafter": Nameless}, "the drafter class Nameless has no name"),
        ("ab", {"drafter": Silent}, "drafter 'silent' proposed None; propose must return a Proposal"),
        ("ab", {"n": 0}, "n=0 is not possible"),
        ("ab", {"logprobs": -1}, "logprobs=-1 is not possible"),
        ("ab", {"logprobs": 1.5}, "logprobs=1.5 is not possible"),
        ("ab", {"stop": None}, "stop=None is not possible"),
        ("ab", {"bad_words": None}, "bad_words=None is not possible"),
        ("ab", {"criteria": [3]}, "criteria=\\[3\\] is not possible"),
        ("ab", {"criteria": print}, "criteria=<built-in function print> is not possible"),
        ("ab", {"logits_processors": None}, "logits_processors=None is not possible"),
        ("ab", {"ignore_eos": "false"}, "ignore_eos='false' is not possible: it must be true or false"),
        ("ab", {"include_stop": 1, "stop": "b"}, "include_stop=1 is not possible"),
        ("ab", {"repetition_penalty": 1e-300}, "repetition_penalty=1e-300 is not possible"),
        ("ab", {"presence_penalty": 1e39}, r"presence_penalty=1e\+39 is not possible"),
        ("ab", {"n_predict": 5}, "there is no option 'n_predict': use max_new_tokens$"),
        ("ab", {"max_batch": 5}, "there is no option 'max_batch' of a text; give it to LLM$"),
        ("ab", {"drafter_options": [1]}, "drafter_options=\\[1\\] is not possible"),
        ("ab", {"drafter_options": {"drafter": "plain"}}, "drafter 'auto' has no option 'drafter'"),
        ("ab", {"drafter_options": {3: 4}}, "drafter_options={3: 4} is not possible"),
        ("ab", {"drafter": "lookahead", "drafter_options": {"window": "a"}}, "window='a' is not possible"),
        ("\ud800", {}, "the prompt holds a lone surrogate"),
        ("ab", {"min_new_tokens": 10, "max_new_tokens": 4}, "min_new_tokens=10 is not possible with max_new_tokens=4"),
        ("ab", {"temperature": 1.0, "seed": 2**64, "n": 2}, "seed=18446744073709551616 is not possible"),
        ("ab", {"drafter": Chains}, "needs telepathy"),
        ("ab", {"drafter": "jacobi", "drafter_options": {"blocks": 2}}, r"did you mean 'block'\?"),
        ("ab", {"prediction": "\udc80"}, "the prediction holds a lone surrogate"),
        ("ab", {"bad_words": ["\udc80"]}, "a bad word holds a lone surrogate"),
        ("ab", {"n": 10**12}, "n=1000000000000 is not possible: it must be a whole number from 1 to 65536"),
        (
            "ab",
            {"logits_processors": [Changing()]},
            "Changing has returned NoneType; it must return the changed logits",
        ),
        (
            "ab",
            {"logits_processors": [PrefixFree(lambda _, logits: logits[:, :5])]},
            r"<lambda> has returned .*\[1, 5\]",
        ),
        (
            "ab",
            {"logits_processors": [lambda _, logits: SimpleNamespace(shape=logits.shape)]},
            r"has returned a types.SimpleNamespace .* must return the changed logits, a numpy.ndarray of shape",
        ),
    ],
)
def test_bad_input_gets_one_sentence(toy: LLM, prompt: Any, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(LeapaheadError, match=sentence) as caught:
        toy.generate(prompt, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["exact", "trust_remote_code"])
def test_what_is_no_boolean_counts_as_none(name: str) -> None:
    for value in ("false", 1, None):
        with pytest.raises(BadParameter, match=f"{name}={value!r} is not possible: it must be true or false"):
            LLM(ToyTarget(), **{name: value})
        with pytest.raises(BadParameter, match=f"{name}={value!r} is not possible"):
            loading.check("model", **{name: value})
    LLM(ToyTarget(), **{name: np.False_})
    for option in ("use_mmap", "use_mlock", "use_extra_bufts", "flash_attn", "kv_unified"):
        with pytest.raises(BadParameter, match=f"{option}='false' is not possible: it must be true or false"):
            loading.check("model.gguf", **{option: "false"})
    with pytest.raises(BadParameter, match="compact='no' is not possible"):
        leapahead.Grammar.json_object(compact="no")  # type: ignore[arg-type]


def test_arrays_and_numpy_numbers_are_prompts_and_options(toy: LLM) -> None:
    import torch

    whole = toy.generate([1, 2, 3], max_new_tokens=5)
    for prompt in (np.array([1, 2, 3]), torch.tensor([1, 2, 3]), [np.int64(1), np.int32(2), 3]):
        assert toy.generate(prompt, max_new_tokens=np.int64(5), seed=np.int64(0)).tokens == whole.tokens
    assert [each.tokens for each in toy.generate(np.array([[1, 2, 3]]), max_new_tokens=5)] == [whole.tokens]
    with pytest.raises(BadParameter, match="at least one prompt"):
        toy.generate([])


# ------------------------------------------------------------------------------------- samples, threads, closing


def test_samples_and_log_probabilities(toy: LLM) -> None:
    options: dict[str, Any] = {"max_new_tokens": 12, "temperature": 1.0}
    samples = toy.generate("ab", seed=5, n=3, logprobs=2, **options)
    assert [each.seed for each in samples] == [5, 6, 7]
    assert [each.seed for each in toy.generate("ab", seed=2**64 - 1, n=2, **options)] == [2**64 - 1, 0]
    for each in samples:
        alone = toy.generate("ab", seed=each.seed, logprobs=2, drafter="plain", **options)
        assert (alone.tokens, alone.logprobs) == (each.tokens, each.logprobs)
        assert [entry.token for entry in each.logprobs] == each.tokens
        assert all(len(entry.top) == 2 for entry in each.logprobs)
    grouped = toy.generate(["ab", "ba"], seed=5, n=2, **options)
    assert [[each.seed for each in group] for group in grouped] == [[5, 6], [5, 6]]
    assert toy.generate("ab", seed=5, **options).logprobs == []
    pieces = list(toy.stream("ab", seed=5, logprobs=2, **options))
    assert [entry for piece in pieces for entry in piece.logprobs] == samples[0].logprobs
    with pytest.raises(BadParameter, match="n samples"):
        toy.stream("ab", n=2)


@pytest.mark.parametrize("drafter", ["auto", "lookahead"])
def test_threads_share_one_model(drafter: str, tiny_folder: Path) -> None:
    """Each thread gets its own text, and what threads leave behind does not change later texts."""
    llm = LLM(str(tiny_folder), drafter=drafter)
    prompts = [f"{word} number {index}" for index, word in enumerate(["def", "The", "for", "return"] * 2)]
    options: dict[str, Any] = {"max_new_tokens": 20, "temperature": 0.7, "seed": 3, "ignore_eos": True}
    alone = [LLM(llm.target, tokenizer=llm.tokenizer, drafter="plain").generate(p, **options).tokens for p in prompts]
    with ThreadPoolExecutor(4) as pool:
        stream = llm.stream(prompts[0], **options)
        first = next(stream)
        assert [r.tokens for r in pool.map(lambda p: llm.generate(p, **options), prompts)] == alone
        assert [*first.tokens, *(token for piece in stream for token in piece.tokens)] == alone[0]
    assert [llm.generate(p, **options).tokens for p in prompts] == alone


def test_a_closed_llm_takes_no_prompts() -> None:
    with LLM(ToyTarget(), drafter="plain") as llm:
        stream = llm.stream([1, 2, 3], max_new_tokens=50)
        next(stream)
    with pytest.raises(LeapaheadError, match="closed"):
        llm.generate([1, 2, 3])
    with pytest.raises(LeapaheadError, match="the LLM was closed"):  # the text is not complete
        list(stream)


def test_closing_releases_what_is_kept_of_earlier_prompts(tiny_folder: Path) -> None:
    target = loading.load(str(tiny_folder)).target
    with LLM(target, drafter="plain") as llm:
        llm.generate([5, 6, 7, 8], max_new_tokens=3)
        assert llm.generate([5, 6, 7, 8], max_new_tokens=3).stats.reused_tokens > 0
    assert LLM(target, drafter="plain").generate([5, 6, 7, 8], max_new_tokens=3).stats.reused_tokens == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the draft model .* takes")
@pytest.mark.parametrize("attribute", ["target.model", "target.executor.cache", "engine"])
def test_a_model_is_freed_with_its_llm(tiny_folder: Path, attribute: str) -> None:
    """The weights of several were kept, whether it was closed or not."""

    def used() -> LLM:
        llm = LLM(str(tiny_folder), draft="self:first=1")
        llm.generate("ab", max_new_tokens=4)
        return llm

    assert is_freed(used, attribute)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Transformers", "GGUF"])
def test_the_interpreter_ends_while_daemon_threads_decode(tiny_folder: Path, kind: str) -> None:
    """Python stops such threads wherever they are. Within a forward, or while the model was freed, that was a crash."""
    if kind == "GGUF":
        pytest.importorskip("llama_cpp")
        import gguf_models

    model = str(tiny_folder if kind == "Transformers" else gguf_models.llama())
    done = run_python(
        "import threading, time\n"
        "from leapahead import LLM\n"
        f"llm, begun = LLM({model!r}, drafter='plain'), threading.Event()\n"
        "def decode():\n"
        "    while True:\n"
        "        for _ in llm.stream([5, 6, 7], max_new_tokens=400, ignore_eos=True):\n"
        "            begun.set()\n"
        "for _ in range(2):\n"
        "    threading.Thread(target=decode, daemon=True).start()\n"
        "begun.wait()\n"
        "time.sleep(0.2)\n"
        "print('ended')\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "ended\n", "")


def test_an_llm_is_not_pickled() -> None:
    with pytest.raises(TypeError, match="cannot be copied or pickled; make one in the process"):
        pickle.dumps(LLM(ToyTarget(), drafter="plain"))


def test_a_stream_complains_when_it_is_asked_for(toy: LLM) -> None:
    with pytest.raises(BadParameter, match="the prompt is empty"):
        toy.stream("")
    with pytest.raises(BadParameter, match="one prompt"):
        toy.stream(["ab", "ba"])  # type: ignore[arg-type]


def test_text_needs_a_tokenizer() -> None:
    llm = LLM(ToyTarget())
    for prompt in ("ab", [{"role": "user", "content": "x"}]):
        with pytest.raises(BadParameter, match=r"needs? a tokenizer"):
            llm.generate(prompt)  # type: ignore[arg-type]
    with pytest.raises(BadParameter, match="need a tokenizer"):
        llm.generate([1], stop="x")
    with pytest.raises(BadParameter, match="needs a tokenizer"):
        llm.generate([1], bad_words=["x"])


def test_a_foreign_tokenizer() -> None:
    llm = LLM(ToyTarget(vocab_size=4), tokenizer=SyllableTokenizer())
    with pytest.raises(
        BadParameter, match="token id 7 is outside the vocabulary of 4; the tokenizer is not this model's"
    ):
        llm.generate("aa")


def test_a_prompt_that_is_too_long() -> None:
    llm = LLM(ToyTarget(context_length=5))
    with pytest.raises(ContextOverflow, match=r"has 5 tokens and the context of toy.* 5; shorten it$"):
        llm.generate([1, 2, 3, 4, 5])
    llm.target.info = replace(llm.target.info, length_option="n_ctx")
    with pytest.raises(ContextOverflow, match=r" 5; shorten it, or load the model with a larger n_ctx$"):
        llm.generate([1, 2, 3, 4, 5])


@pytest.mark.parametrize(
    ("model", "options", "sentence"),
    [
        (3, {}, "a model must be a name, a path, a loaded Transformers model or a leapahead target, got int"),
        (SimpleNamespace(info=ToyTarget().info, cost=len), {}, "no target without lock, .*, fork, step$"),
        ("/no/such/folder", {}, "no folder '/no/such/folder'"),
        (ToyTarget(), {"drafter": "lokahead"}, "did you mean 'lookahead'"),
        (ToyTarget(), {"threads": 2}, r"LLM has no option 'threads' \(did you mean 'n_threads'\?\)"),
        (ToyTarget(), {"torch_dtype": "float32"}, "LLM has no option 'torch_dtype' .did you mean 'dtype'"),
        (ToyTarget(), {"max_num_seqs": 4}, "LLM has no option 'max_num_seqs': use max_batch$"),
        (ToyTarget(), {"drafter_options": {}}, "drafter 'auto' has no option 'drafter_options'; it has sources"),
        (ToyTarget(), {"temperature": 0.5}, "LLM has no option 'temperature'; give it to generate or stream"),
        (ToyTarget(), {"drafter": "prompt_lookup", "nodes": 3}, "drafter 'prompt_lookup' has no option 'nodes';"),
        (ToyTarget(), {"nods": 3}, "drafter 'auto' has no option 'nods' .did you mean 'nodes'"),
        (ToyTarget(), {"nodes": -1}, "nodes=-1"),
        (ToyTarget(), {"drafter": "lookahead", "windw": 3}, "did you mean 'window'"),
        (ToyTarget(), {"drafter": "lookahead", "window": 0}, "window=0"),
        (ToyTarget(), {"max_batch": 0}, "max_batch=0"),
        (ToyTarget(), {"max_batch": 10**9}, "max_batch=1000000000.*a whole number from 1 to 65536"),
        (ToyTarget(capabilities=frozenset()), {"drafter": "lookahead"}, "needs tree from the target"),
    ],
)
def test_bad_models_and_drafters(model: Any, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(LeapaheadError, match=sentence):
        LLM(model, **options)


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_the_type_hints_know_what_samples_give(kind: type[Any]) -> None:
    hints = [(each.__annotations__["prompt"], "n" in each.__annotations__) for each in get_overloads(kind.generate)]
    returned = [each.__annotations__["return"] for each in get_overloads(kind.generate)]
    assert "options" in get_type_hints(kind.generate), "tools that read hints find every name"
    assert dict(zip(hints, returned, strict=True)) == {
        ("Prompt", False): "Result",
        ("Prompts", False): "list[Result]",
        ("Prompt", True): "list[Result]",
        ("Prompts", True): "list[list[Result]]",
    }


def test_the_default_decodes_plainly_where_nothing_can_be_drafted_and_warns_once() -> None:
    with pytest.warns(UserWarning, match="'auto' cannot draft for this target, so it decodes plainly") as warned:
        llm = LLM(ToyTarget(capabilities=frozenset()))
    assert len(warned) == 1  # and warnings are errors from here on
    result = llm.generate([1, 2, 3], max_new_tokens=30)
    assert result.tokens == llm.generate([1, 2, 3], max_new_tokens=30, drafter="plain").tokens
    assert (result.stats.drafted, result.stats.steps) == (0, 30)


def test_a_missing_bundled_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(loading.resources, "files", lambda package: tmp_path)
    with pytest.raises(Refused, match="no bundled model"):
        LLM()


def test_the_repr(toy: LLM) -> None:
    assert repr(toy) == "LLM('toy(vocab_size=12, order=2, seed=0)', drafter='auto')"


FORKED = """
import asyncio, os, signal, sys, threading, time
from leapahead import LLM, AsyncLLM, LeapaheadError
from leapahead.models.toy import ToyTarget

inside, over = threading.Event(), threading.Event()

def wait(tokens):
    inside.set()
    return over.wait() and False

def in_child(call):
    sys.stdout.flush()
    if not (child := os.fork()):
        signal.alarm(20)
        try:
            print(call(), flush=True)
        except LeapaheadError as error:
            print(error, flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, "the child was hung"

def text(llm):
    return llm.generate([1, 2, 3], max_new_tokens=5).tokens

def later(llm):
    found = llm.generate([1, 2, 3], max_new_tokens=5)
    return asyncio.run(found).tokens

llm, other = LLM(ToyTarget()), AsyncLLM(ToyTarget())
assert text(llm) == later(other)
while other.llm.engine._turn._driver is not None:  # its thread has not ended the last step
    time.sleep(0.01)
time.sleep(0.2)
"""
DRIVEN = (
    "thread = threading.Thread(target=lambda: llm.generate([1, 2, 3], max_new_tokens=5, criteria=[wait]))\n"
    "thread.start(), inside.wait()\n"
)
DRIVEN_LATER = """
async def ask():
    await other.generate([1, 2, 3], max_new_tokens=5, criteria=[wait])
thread = threading.Thread(target=lambda: asyncio.run(ask()))
thread.start(), inside.wait()
"""
HELD = """
def hold():
    with llm.drafter_cache._lock, llm.engine.acceptance._lock, llm.inputs.grammars._lock, other._driver._starting:
        wait([])
thread = threading.Thread(target=hold)
thread.start(), inside.wait()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.parametrize(
    ("before", "call", "works"),
    [
        (HELD, "text(llm)", True),
        (DRIVEN, "text(llm)", False),
        *mostly_slow(
            [
                ("", "text(llm)", True),
                ("", "later(other)", True),
                (HELD, "later(other)", True),
                (DRIVEN, "text(LLM(ToyTarget()))", True),
                (DRIVEN, "later(other)", True),
                (DRIVEN, "next(llm.stream([1, 2, 3]))", False),
                (DRIVEN, "llm.engine.drafter('lookahead')", False),
                (DRIVEN, "llm.close()", False),
                (DRIVEN, "later(AsyncLLM(llm))", False),
                (DRIVEN, "text(LLM(llm.target))", False),
                (DRIVEN_LATER, "later(other)", False),
                (DRIVEN_LATER, "text(other.llm)", False),
            ]
        ),
    ],
)
def test_a_forked_child_works_or_refuses_what_another_thread_drove(before: str, call: str, works: bool) -> None:
    end = "over.set()\nif before: thread.join()\nprint(text(llm), text(other.llm))\n"
    script = f"{FORKED}before = {before!r}\n{before}\nin_child(lambda: {call})\n{end}"
    done = run_python(script)
    assert done.returncode == 0, done.stderr
    child, parent = done.stdout.splitlines()
    expected = str(LLM(ToyTarget()).generate([1, 2, 3], max_new_tokens=5).tokens)
    assert parent == f"{expected} {expected}"
    if works:
        assert child == expected
    else:
        assert re.fullmatch(
            "this LLM, or its engine, was forked while another thread used it, .* in each process", child
        )


DRAFTED = """
from leapahead.models.loading import Loaded

class Threaded(ToyTarget):
    has_threads = True

def drafting(**options):
    return LLM(ToyTarget(), drafter="draft_model", draft=Loaded(Threaded(), None, ()), **options)

new, used = drafting(), drafting(nodes=3, depth=3)
text(used)
stream = used.stream([1, 2, 3], max_new_tokens=50)
next(stream)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_child_is_refused_a_draft_model_with_threads() -> None:
    """It does not have them, and would wait for them for ever. Without the draft model it goes on."""
    refused = ["text(new)", "text(used)", "list(stream)"]
    works = ["text(LLM(used.target))", "used.generate([1, 2, 3], max_new_tokens=5, drafter='plain').tokens"]
    calls = "".join(f"in_child(lambda: {call})\n" for call in refused + works)
    done = run_python(f"{FORKED}{DRAFTED}{calls}print(text(used))\n")
    assert done.returncode == 0, done.stderr
    children = done.stdout.splitlines()
    expected = str(LLM(ToyTarget()).generate([1, 2, 3], max_new_tokens=5).tokens)
    assert children[3:] == [expected] * 3
    for child in children[:3]:
        assert re.fullmatch(
            "this LLM, or its engine, was forked while its draft model had threads .* in each process", child
        )
