"""The options of an OpenVINO model: how it is compiled and run. This module does not import openvino."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leapahead.core.errors import BadParameter
from leapahead.core.parameters import is_whole

MODEL = "openvino_model.xml"  # the file that makes a folder an OpenVINO folder
METADATA = "metadata.gguf"  # of the GGUF file that a folder was made from
PRECISIONS = ("f32", "bf16", "f16")  # of computation, and of cached keys and values


@dataclass(frozen=True, kw_only=True)
class OpenVinoOptions:
    """How OpenVINO compiles and runs a model on the CPU.

    Attributes:
        n_threads: threads of a forward; by default one per physical core.
        precision: of the computation: f32, bf16 or f16; by default f32 where the weights are f32, else OpenVINO's own
            choice, which is bf16 on a processor that computes with it.
        cache_type: of cached keys and values: f32, bf16 or f16; by default that of the computation.
        cache_tokens: greatest number of tokens in the KV cache, all sequences together; by default as many as fit in
            half of the free memory.
        copies: how often the model is compiled: once for prompts and plain steps, and once for each size of drafted
            steps that stays prepared; with 1, every change of the size takes longer. Each takes up to twice the memory
            of the weights, and the time of compiling. More than 1 only where the model has paged attention.

    Raises:
        BadParameter: a value is not possible.
    """

    n_threads: int | None = None
    precision: str | None = None
    cache_type: str | None = None
    cache_tokens: int | None = None
    copies: int = 1

    def __post_init__(self) -> None:
        for name, least in (("n_threads", 1), ("cache_tokens", 2), ("copies", 1)):
            value = getattr(self, name)
            if value is not None and (not is_whole(value) or value < least):
                raise BadParameter(f"{name}={value!r} is not possible: it must be a whole number, at least {least}")
        for name in ("precision", "cache_type"):
            if getattr(self, name) not in (None, *PRECISIONS):
                raise BadParameter(
                    f"{name}={getattr(self, name)!r} is not possible; choose one of {', '.join(PRECISIONS)}"
                )


def is_openvino(path: Any) -> bool:
    """Whether this names a folder with an OpenVINO model.

    Raises:
        BadParameter: it names a place that may not be entered, or cannot be.
    """
    try:
        return isinstance(path, (str, os.PathLike)) and (Path(os.path.expanduser(path)) / MODEL).is_file()
    except OSError as error:
        raise BadParameter(
            f"{str(path)!r} cannot be looked into ({error.strerror}); give the folder of a model that you may read"
        ) from None
