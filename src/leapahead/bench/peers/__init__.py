"""Other implementations (peers), measured in the same run on the same weights and prompts, one small file for each.

    --peer NAME:KEY=VALUE,...  ->  a class of PEERS, its fields are the keys  ->  a contender for each loaded model

A peer that cannot run a model or a cell is left out and reported by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from leapahead.bench.contender import Contender
from leapahead.core.errors import BadParameter, needing
from leapahead.core.parameters import listed, meant
from leapahead.models.loading import Loaded

# name -> (module here, class)
PEERS = {
    "transformers": ("transformers", "Greedy"),
    "transformers-prompt-lookup": ("transformers", "PromptLookup"),
    "transformers-assisted": ("transformers", "Assisted"),
    "llama-lookahead": ("llama_cpp", "Lookahead"),
    "llama-lookup": ("llama_cpp", "Lookup"),
    "llama-speculative-simple": ("llama_cpp", "SpeculativeSimple"),
    "openvino-genai": ("openvino", "Plain"),
    "openvino-prompt-lookup": ("openvino", "PromptLookup"),
    "vllm": ("vllm", "Plain"),
    "vllm-ngram": ("vllm", "Ngram"),
    "vllm-suffix": ("vllm", "Suffix"),
    "vllm-head": ("vllm", "Head"),
    "vllm-leapahead": ("vllm_leapahead", "Leapahead"),
}


@dataclass(frozen=True)
class Entry:
    """A loaded model that a peer is to run.

    Attributes:
        loaded: the target and its tokenizer.
        model: the folder or file that it was loaded from; None for the bundled model.
        threads: None for the peer's default.
    """

    loaded: Loaded
    model: str | None = None
    threads: int | None = None


def where(description: str, **options: Any) -> Any:
    """A field that is a path needed by the peer, and not part of its label."""
    return field(metadata={"where": description}, **options)


@dataclass(frozen=True)
class Peer(ABC):
    """A configured peer. The fields of a subclass are its options, strings or whole numbers.

    Attributes:
        name: in PEERS.

    Raises:
        BadParameter: it cannot run with these options. Raised by the constructor, before anything is measured.
    """

    name: ClassVar[str]

    @property
    def label(self) -> str:
        """The name in tables, after "peer:", with the options that differ from their defaults."""
        given = ", ".join(
            f"{each.name}={getattr(self, each.name)}"
            for each in fields(self)
            if "where" not in each.metadata and getattr(self, each.name) != each.default
        )
        return f"{self.name}({given})" if given else self.name

    @abstractmethod
    def version(self) -> str:
        """The version of the implementation, for the conditions."""

    @abstractmethod
    def enter(self, name: str, entry: Entry) -> Contender:
        """A contender of that name for a loaded model.

        Raises:
            Refused: it cannot run this model.
        """


def configured(texts: Sequence[str]) -> list[Peer]:
    """Peers from `NAME:KEY=VALUE,...`; a value with commas is put in quotes.

    Raises:
        BadParameter: there is no such peer or option, a needed option is missing, or the peer cannot run.
    """
    return [_configured(text) for text in texts]


def _configured(text: str) -> Peer:
    name, _, given = text.partition(":")
    if (name := name.strip()) not in PEERS:
        raise BadParameter(f"there is no peer {name!r}{meant(name, PEERS)}; there are {', '.join(PEERS)}")
    module, kind = PEERS[name]
    packages = ("torch", "transformers", "safetensors", "llama_cpp", "openvino", "openvino_genai")
    with needing(f"the peer {name}", module.replace("_", "-"), *packages):
        cls: type[Peer] = getattr(import_module(f"{__name__}.{module}"), kind)
    known = {each.name: each for each in fields(cls)}
    options: dict[str, Any] = {}
    for pair in listed(given):
        key, equals, value = pair.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or key not in known:
            there = ", ".join(f"{each}=..." for each in known) or "none"
            raise BadParameter(
                f"--peer {text} is not possible: {pair!r} is not an option of {name}; there are: {there}"
            )
        if str(known[key].type).startswith("int"):
            if not value.strip().isdecimal():
                raise BadParameter(f"--peer {text} is not possible: {key} must be a whole number")
            options[key] = int(value)
        else:
            options[key] = value.strip()
    for key, each in known.items():
        if each.default is MISSING and key not in options:
            raise BadParameter(f"--peer {name} needs {key}=..., {each.metadata.get('where', 'a value')}")
    return cls(**options)


def executable(path: str) -> str:
    """The path of a program.

    Raises:
        BadParameter: it does not exist or is not executable.
    """
    from shutil import which

    found = which(path)
    if found is None:
        kind = "is not executable" if Path(path).is_file() else "does not exist"
        raise BadParameter(f"the program {path} {kind}; give the path of the peer's program")
    return found
