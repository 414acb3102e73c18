"""Makes a target of what names or is a model: None (the bundled model), a name or path, a module, a target.

A backend is imported when a model of its kind is loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from leapahead.core.errors import BadParameter, Refused, needing
from leapahead.core.text import Tokenizer
from leapahead.models.base import Target
from leapahead.models.llama_cpp.options import LlamaCppOptions

BUNDLED = "bundled"
LLAMA_CPP_OPTIONS = tuple(LlamaCppOptions.__dataclass_fields__)  # for a GGUF file only


@dataclass(frozen=True)
class Loaded:
    """A target and what came with it.

    Attributes:
        eos_token_ids: of the generation config, the config and the tokenizer together, which often differ.
    """

    target: Target
    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]


def load(
    model: Any = None,
    *,
    tokenizer: Tokenizer | str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    cache_tokens: int | None = None,
    **llama_cpp_options: Any,
) -> Loaded:
    """Loads a target.

    Args:
        model: None for the bundled one, a hub name or a folder, a GGUF file, a loaded `torch.nn.Module`, or a `Target`.
        tokenizer: instead of the model's own; or the name or folder of one.
        dtype, device: for a name or path; a loaded model is not changed.
        trust_remote_code: whether Python code that comes with the model may run.
        cache_tokens: of a Transformers model, the size of its KV cache, see `TransformersTarget`; by default what fits
            in the free memory. The cache of a GGUF file has `n_ctx` tokens.
        llama_cpp_options: for a GGUF file, see `LlamaCppOptions`.

    Raises:
        LeapaheadError: no such model, a model that cannot be decoded, an option that this kind of model does not have,
            or a package that it needs is not installed.
    """
    found: Tokenizer | None = None
    ends: tuple[int, ...] = ()
    name = BUNDLED if model is None else model
    is_gguf = isinstance(model, (str, Path)) and str(model).lower().endswith(".gguf")
    if llama_cpp_options and not is_gguf:
        raise BadParameter(f"{', '.join(llama_cpp_options)} can be set for a GGUF file only, not for {name!r}")
    if cache_tokens is not None and (is_gguf or isinstance(model, Target)):
        raise BadParameter(
            f"cache_tokens={cache_tokens} is for Transformers models that are loaded here; set n_ctx for a GGUF file"
        )
    if is_gguf:
        target, gguf_tokenizer = _gguf(model, dtype, device, llama_cpp_options)
        found, ends = gguf_tokenizer, gguf_tokenizer.end_token_ids
    elif model is None or isinstance(model, (str, Path)):
        target, found = _pretrained().load(
            model or bundled(),
            name=str(name),
            dtype=dtype,
            device=device,
            trust_remote_code=trust_remote_code,
            cache_tokens=cache_tokens,
        )
    elif _is_module(model):
        target = _module_target(model, cache_tokens)
    elif isinstance(model, Target):
        target = model
    else:
        what = "a name, a path, a loaded Transformers model or a leapahead target"
        raise BadParameter(f"a model must be {what}, got {type(model).__name__}")
    if isinstance(tokenizer, str):
        found = load_tokenizer(tokenizer, trust_remote_code)
    elif tokenizer is not None and not callable(getattr(tokenizer, "encode", None)):
        raise BadParameter(f"tokenizer={tokenizer!r} is not possible: give a loaded tokenizer, or its name or folder")
    elif tokenizer is not None:
        found = tokenizer
    return Loaded(target, found, tuple(dict.fromkeys((*ends, *eos_token_ids(target, found)))))


def bundled(name: str = "tiny") -> str:
    """The folder of the bundled model, or of its draft model ("tiny-draft")."""
    folder = Path(str(resources.files("leapahead"))) / "assets" / name
    if not (folder / "config.json").is_file():
        raise Refused("this installation has no bundled model; name a model (--model, or LLM('name or path'))")
    return str(folder)


def eos_token_ids(target: Target, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Every id that ends a text by the tokenizer or a configuration, except ids outside the vocabulary."""
    claims: list[Any] = [tokenizer.eos_token_id] if tokenizer is not None else []
    model = getattr(target, "model", None)  # only a Transformers target has one
    if _is_module(model):
        config = getattr(model, "config", None)
        claims += [
            getattr(getattr(model, "generation_config", None), "eos_token_id", None),
            getattr(config, "eos_token_id", None),
            getattr(config.get_text_config(), "eos_token_id", None) if config is not None else None,
        ]
    ids: dict[int, None] = {}
    for claim in claims:
        for token in claim if isinstance(claim, Iterable) else [claim]:
            if token is not None and 0 <= int(token) < target.info.vocab_size:
                ids[int(token)] = None
    return tuple(ids)


def gguf_tokenizer(path: str) -> Tokenizer:
    """The tokenizer of a GGUF file, read without its weights.

    Raises:
        LeapaheadError: the file is missing or broken, or llama-cpp-python is not installed.
    """
    with needing("a GGUF file", "llama-cpp", "llama_cpp"):
        from leapahead.models.llama_cpp import model
    return model.read_tokenizer(path)


def load_tokenizer(name: str, trust_remote_code: bool) -> Tokenizer:
    """The tokenizer of a folder or a hub id.

    Raises:
        BadParameter: it cannot be loaded.
    """
    tokenizer: Tokenizer = _pretrained().load_tokenizer(name, trust_remote_code)
    return tokenizer


def _is_module(model: object) -> bool:
    torch = sys.modules.get("torch")  # a module exists only where torch has been imported
    return torch is not None and isinstance(model, torch.nn.Module)


def _gguf(path: str | Path, dtype: str, device: str, options: dict[str, Any]) -> Any:
    with needing("a GGUF file", "llama-cpp", "llama_cpp"):
        from leapahead.models.llama_cpp import model
    if dtype != "auto":
        raise BadParameter(f"dtype={dtype!r} is not possible with a GGUF file, which has its own; export it as another")
    if device not in ("auto", "cpu"):
        raise BadParameter(f"device={device!r} is not possible with a GGUF file; n_gpu_layers says what goes to a GPU")
    if device == "cpu":
        options = {"n_gpu_layers": 0, **options}
    if unknown := [name for name in options if name not in LLAMA_CPP_OPTIONS]:
        raise BadParameter(f"there is no option {unknown[0]!r}; there are {', '.join(LLAMA_CPP_OPTIONS)}")
    return model.load(path, LlamaCppOptions(**options))


def _module_target(model: Any, cache_tokens: int | None) -> Target:
    with needing("this model", "transformers", "torch", "transformers", "safetensors"):
        from leapahead.models.transformers import model as backend
    target: Target = backend.TransformersTarget(model, cache_tokens=cache_tokens)
    return target


def _pretrained() -> Any:
    with needing("this model", "transformers", "torch", "transformers", "safetensors"):
        import torch  # noqa: F401
        import transformers

        from leapahead.models.transformers import require_version

        require_version(transformers.__version__)
        from leapahead.models.transformers import pretrained
    return pretrained
