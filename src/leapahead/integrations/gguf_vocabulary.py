"""The byte-level BPE tokenizer of a Hugging Face folder, in the terms of a GGUF file.

A tokenizer that llama.cpp would apply differently from tokenizer.json is refused by name; the few characters for which
a difference remains are listed in `gguf`. This module knows no weights.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leapahead.core.errors import BadParameter, Refused

ELSEWHERE = "try llama.cpp's own convert_hf_to_gguf.py"

# The pre-tokenizer of Llama 3, as its tokenizer.json spells it.
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
GPT_2_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
BYTES_ONLY = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}

# llama.cpp's name, the steps of tokenizer.json, and `ignore_merges`: whether a word that is a token is taken before any
# merge. llama.cpp derives the latter from the name, so the folder must agree.
PRE_TOKENIZERS: tuple[tuple[str, list[dict[str, Any]], bool], ...] = (
    ("gpt-2", [GPT_2_BYTES], False),
    ("smollm", [{"type": "Digits", "individual_digits": True}, GPT_2_BYTES], False),
    (
        "llama-bpe",
        [{"type": "Split", "pattern": {"Regex": LLAMA_3}, "behavior": "Isolated", "invert": False}, BYTES_ONLY],
        True,
    ),
)
ENDS = ("eos", "eot", "eom")  # the ids that end a text in a GGUF file, all alike


@dataclass(frozen=True)
class Vocabulary:
    """A byte-level BPE tokenizer in the terms of GGUF.

    Attributes:
        pre: llama.cpp's name of the pre-tokenizer.
        texts: for every id the byte-level spelling of a token, and the plain text of an added token.
        merges: the merges, each as two texts with a space between them.
        added: id of every added token -> whether it is special, and so recognised only where special tokens are.
        unused: ids that the model has and the tokenizer does not.
        special: "bos", "eos", ... -> id.
        add_bos, add_eos: whether the tokenizer adds BOS before a text, and EOS after it.
        chat: the chat template, or several by name.
    """

    pre: str
    texts: list[str]
    merges: list[str]
    added: Mapping[int, bool]
    unused: frozenset[int]
    special: Mapping[str, int]
    add_bos: bool
    add_eos: bool
    chat: Any

    @classmethod
    def read(cls, folder: Path, size: int) -> Vocabulary:
        """Reads the tokenizer of a folder for a model of `size` ids.

        Raises:
            BadParameter: a file is missing or broken.
            Refused: llama.cpp would tokenize differently, or a GGUF file cannot hold the tokenizer.
        """
        file = folder / "tokenizer.json"
        if not file.is_file() and (folder / "tokenizer.model").is_file():
            raise Refused(
                f"{folder} has a SentencePiece tokenizer, and only byte-level BPE can be exported: {ELSEWHERE}"
            )
        tokenizer, config = read_json(file, required=True), read_json(folder / "tokenizer_config.json")
        try:
            pre, model = _pre_tokenizer(file, tokenizer), tokenizer["model"]
            vocab = {str(text): int(token) for text, token in model["vocab"].items()}
            added = _added_tokens(file, tokenizer, config, vocab)
            merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadParameter(f"{file} is broken ({error!r}): save the tokenizer again") from None
        by_id = {token: text for text, token in vocab.items()}
        by_id.update((token, text) for text, (token, _) in added.items())
        if max(by_id) >= size:
            raise Refused(f"{file} has the id {max(by_id)}, and the model of {folder} only {size} ids: match them")
        unused = frozenset(range(size)) - by_id.keys()
        by_id.update((token, f"[PAD{token}]") for token in unused)
        if len(set(by_id.values())) != len(by_id):  # llama.cpp ends the process
            twice = Counter(by_id.values()).most_common(1)[0][0]
            raise Refused(f"{file} has two ids for the text {twice!r}, which a GGUF file cannot hold")
        ids = {text: token for token, text in by_id.items()}
        special = _special_ids(folder, config, ids, size)
        add_bos, add_eos = _surroundings(file, tokenizer, special)
        return cls(
            pre=pre,
            texts=[by_id[token] for token in range(size)],
            merges=merges,
            added=dict(added.values()),
            unused=unused,
            special=special,
            add_bos=add_bos,
            add_eos=add_eos,
            chat=_chat_template(folder, config),
        )

    def write(self, writer: Any) -> None:
        """Adds the tokenizer's keys to a `gguf.GGUFWriter`."""
        from gguf import TokenType

        kinds = [TokenType.NORMAL] * len(self.texts)
        for token, special in self.added.items():
            kinds[token] = TokenType.CONTROL if special else TokenType.USER_DEFINED
        for token in self.unused:
            kinds[token] = TokenType.UNUSED
        writer.add_tokenizer_model("gpt2")  # any byte-level BPE
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(self.texts)
        writer.add_token_types(kinds)
        writer.add_token_merges(self.merges)
        for name, token in self.special.items():
            writer.add_uint32(f"tokenizer.ggml.{_KEYS.get(name, name)}_token_id", token)
        writer.add_add_bos_token(self.add_bos)
        writer.add_add_eos_token(self.add_eos)
        if self.chat:
            writer.add_chat_template(self.chat)


_KEYS = {"unk": "unknown", "pad": "padding"}  # where GGUF's term is longer


def _pre_tokenizer(file: Path, tokenizer: Mapping[str, Any]) -> str:
    """llama.cpp's name of the pre-tokenizer. A tokenizer that llama.cpp does not have is refused."""
    model, decoder = tokenizer["model"], tokenizer.get("decoder") or {}
    if model.get("type", "BPE") != "BPE" or model.get("byte_fallback") or decoder.get("type") != "ByteLevel":
        kind = "BPE with byte fallback" if model.get("byte_fallback") else model.get("type", "BPE")
        raise Refused(f"{file} is not a byte-level BPE tokenizer ({kind}, decoder {decoder.get('type')}): {ELSEWHERE}")
    wrong = {key for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix") if model.get(key)}
    if wrong or tokenizer.get("normalizer") is not None:
        what = sorted(wrong)[0] if wrong else f"a normalizer ({tokenizer['normalizer'].get('type')})"
        raise Refused(f"{file} has {what}, which llama.cpp does not apply: export a tokenizer without it")
    if not model["merges"]:
        raise Refused(f"{file} has no merges, without which llama.cpp loads no BPE")
    if missing := _bytes_of_text() - model["vocab"].keys():
        raise Refused(f"{file} has no token for {len(missing)} of the bytes of UTF-8: llama.cpp reads them otherwise")
    section = tokenizer.get("pre_tokenizer") or {}
    steps = [_plain_step(step) for step in section.get("pretokenizers", [section])]
    names = [
        name for name, known, whole in PRE_TOKENIZERS if (known, whole) == (steps, bool(model.get("ignore_merges")))
    ]
    if not names:
        kinds = "+".join(str(step.get("type")) for step in steps)
        known = ", ".join(name for name, _, _ in PRE_TOKENIZERS)
        raise Refused(f"{file} has a pre-tokenizer ({kinds}) that is not one of those verified ({known}): {ELSEWHERE}")
    return names[0]


def _plain_step(step: Mapping[str, Any]) -> dict[str, Any]:
    """A step without the parameters that change offsets only, and with the default that old files leave out."""
    default = {"use_regex": True} if step.get("type") == "ByteLevel" else {}
    return {**default, **{key: value for key, value in step.items() if key != "trim_offsets"}}


def _bytes_of_text() -> set[str]:
    """GPT-2's printable substitutes of the bytes that UTF-8 uses: a printable byte stands for itself."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    substitutes = {**{byte: byte for byte in printable}, **{byte: 256 + place for place, byte in enumerate(others)}}
    never = {0xC0, 0xC1, *range(0xF5, 0x100)}
    return {chr(substitute) for byte, substitute in substitutes.items() if byte not in never}


def _added_tokens(
    file: Path, tokenizer: Mapping[str, Any], config: Mapping[str, Any], vocab: Mapping[str, int]
) -> dict[str, tuple[int, bool]]:
    """Text -> (id, special) of the tokens that are recognised before all others, collected as Transformers does."""
    found: dict[str, tuple[int, bool]] = {}
    listed = [*tokenizer.get("added_tokens", ())]
    listed += [{**token, "id": int(key)} for key, token in (config.get("added_tokens_decoder") or {}).items()]
    for token in listed:
        text = token["content"]
        for flag in ("lstrip", "rstrip", "single_word"):
            if token.get(flag):
                raise Refused(f"{file} has the added token {text!r} with {flag}, which a GGUF file cannot hold")
        found.setdefault(text, (int(token["id"]), bool(token.get("special"))))
    named = [config.get(key) for key in config if key.endswith("_token")]
    for several in (config.get("additional_special_tokens"), config.get("extra_special_tokens")):
        named += list(several.values() if isinstance(several, dict) else several or ())
    for text in map(_content, named):
        if text is not None and text not in found:
            if text not in vocab:
                raise Refused(
                    f"{file} lacks the token {text!r} that tokenizer_config.json names: save the tokenizer again"
                )
            found[text] = (vocab[text], True)
    return found


def _content(token: Any) -> str | None:
    """The text of a token in tokenizer_config.json, a string or an object; None for a flag such as add_bos_token."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _special_ids(folder: Path, config: Mapping[str, Any], ids: Mapping[str, int], size: int) -> dict[str, int]:
    """The ids with a role. Up to three ids may end a text."""
    model = read_json(folder / "config.json")
    special = {}
    for role in ("bos", "pad", "unk"):
        text = _content(config.get(f"{role}_token"))
        token = ids.get(text) if text is not None else model.get(f"{role}_token_id")
        if isinstance(token, int) and 0 <= token < size:
            special[role] = token
    text = _content(config.get("eos_token"))
    claims: list[Any] = [ids.get(text) if text is not None else None]
    for claim in (read_json(folder / "generation_config.json").get("eos_token_id"), model.get("eos_token_id")):
        claims += claim if isinstance(claim, list) else [claim]
    ends = dict.fromkeys(token for token in claims if isinstance(token, int) and 0 <= token < size)
    if not ends:  # llama.cpp would take id 11
        raise Refused(f"{folder} names no token that ends a text, and GGUF needs one: set eos_token_id in config.json")
    if len(ends) > len(ENDS):
        raise Refused(
            f"{folder} names {len(ends)} tokens that end a text, and a GGUF file holds {len(ENDS)}: {[*ends]}"
        )
    return {**special, **dict(zip(ENDS, ends, strict=False))}


def _surroundings(file: Path, tokenizer: Mapping[str, Any], special: Mapping[str, int]) -> tuple[bool, bool]:
    """Whether the tokenizer adds BOS before a text, and EOS after it.

    tokenizer_config.json may have flags for it, but Transformers ignores them where there is a tokenizer.json.
    """
    processor = tokenizer.get("post_processor") or {}
    before, after = False, False
    for step in processor.get("processors", [processor]):
        if step.get("type") == "TemplateProcessing":
            single = [next(iter(piece.items())) for piece in step["single"]]
            text = [kind for kind, _ in single].index("Sequence")
            for role, pieces in (("bos", single[:text]), ("eos", single[text + 1 :])):
                ids = [token for _, piece in pieces for token in step["special_tokens"][piece["id"]]["ids"]]
                if ids not in ([], [special.get(role)]):
                    raise Refused(
                        f"{file} adds the ids {ids} to a text, where GGUF has only one {role} token: {ELSEWHERE}"
                    )
            before, after = text > 0, text + 1 < len(single)
        elif step.get("type") not in (None, "ByteLevel"):  # which changes offsets only
            raise Refused(f"{file} has a post-processor {step['type']}, which llama.cpp does not apply: {ELSEWHERE}")
    return before, after


def _chat_template(folder: Path, config: Mapping[str, Any]) -> Any:
    """The template's text, or a list of {name, template}. Template files take precedence over tokenizer_config.json."""
    file = folder / "chat_template.jinja"
    others = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    if not others:
        return file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
    named = [*([("default", file)] if file.is_file() else []), *((other.stem, other) for other in others)]
    return [{"name": name, "template": path.read_text(encoding="utf-8")} for name, path in named]


def read_json(file: Path, *, required: bool = False) -> dict[str, Any]:
    """The object in a file; empty if there is no such file."""
    if not file.is_file():
        if required:
            raise BadParameter(f"{file.parent} has no {file.name}: name a folder that save_pretrained wrote")
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadParameter(f"{file} is not JSON ({error}): download or save it again") from None
    if not isinstance(found, dict):
        raise BadParameter(f"{file} does not hold a JSON object: download or save it again")
    return found
