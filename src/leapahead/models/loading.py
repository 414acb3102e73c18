"""A target from whatever names or holds a model: nothing (the bundled one), a name or path, a module, a target.

Each backend is imported when a model of its kind is asked for; this file knows none of them.
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

BUNDLED = "bundled"
# Of `LlamaCppOptions`, which only a GGUF file brings in.
LLAMA_CPP_OPTIONS = (
    *("n_ctx", "n_batch", "n_ubatch", "n_threads", "n_threads_batch", "n_gpu_layers", "use_mmap", "use_mlock"),
    *("flash_attn", "type_k", "type_v", "n_seq_max"),
)


@dataclass(frozen=True)
class Loaded:
    """A target and what came with it.

    Attributes:
        eos_token_ids: of the generation config, the config and the tokenizer together; they rarely agree.
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
        dtype, device: where and how a name or path is loaded; a loaded model stays as it is.
        trust_remote_code: run Python code that comes with the model.
        cache_tokens: greatest number of tokens in the KV cache of a Transformers model; None for what fits in memory.
        llama_cpp_options: of a GGUF file, see `LlamaCppOptions`.

    Raises:
        LeapaheadError: no such model, a model that cannot be decoded, an option that this kind of model does not have,
            or what its kind needs is not installed.
    """
    found: Tokenizer | None = None
    ends: tuple[int, ...] = ()
    if isinstance(model, (str, Path)) and str(model).lower().endswith(".gguf"):
        target, gguf_tokenizer = _gguf(model, dtype, device, llama_cpp_options)
        found, ends = gguf_tokenizer, gguf_tokenizer.end_token_ids
    elif llama_cpp_options:
        raise BadParameter(f"{', '.join(llama_cpp_options)} can be set for a GGUF file only, not for {model!r}")
    elif model is None or isinstance(model, (str, Path)):
        folder = bundled() if model is None else str(model)
        target, found = _transformers().load(folder, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
        if model is None:
            target.name = BUNDLED
    elif _is_module(model):
        target = _transformers().TransformersTarget(model)
    elif isinstance(model, Target):
        target = model
    else:
        raise BadParameter(
            f"a model must be a name, a path, a loaded torch module or a leapahead target, got {type(model).__name__}"
        )
    if isinstance(tokenizer, str):
        found = load_tokenizer(tokenizer, trust_remote_code)
    elif tokenizer is not None:
        found = tokenizer
    return Loaded(target, found, tuple(dict.fromkeys((*ends, *eos_token_ids(target, found)))))


def bundled(name: str = "tiny") -> str:
    """The folder of the bundled model, or of its draft ("tiny-draft")."""
    folder = Path(str(resources.files("leapahead"))) / "assets" / name
    if not (folder / "config.json").is_file():
        raise Refused("this installation has no bundled model; name one (--model, or LLM('name or path'))")
    return str(folder)


def eos_token_ids(target: Target, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Every id that ends a text, by anyone's word; ids outside the vocabulary are left out."""
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
            if token is not None and 0 <= int(token) < target.vocab_size:
                ids[int(token)] = None
    return tuple(ids)


def load_tokenizer(name: str, trust_remote_code: bool) -> Tokenizer:
    _transformers()
    from transformers import AutoTokenizer

    try:
        tokenizer: Tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise BadParameter(f"the tokenizer {name!r} cannot be loaded: {reason}") from error
    return tokenizer


def _is_module(model: object) -> bool:
    torch = sys.modules.get("torch")  # a module exists only where torch has been imported
    return torch is not None and isinstance(model, torch.nn.Module)


def _gguf(path: str | Path, dtype: str, device: str, options: dict[str, Any]) -> Any:
    with needing("a GGUF file", "llama-cpp", "llama_cpp"):
        from leapahead.models.llama_cpp import context, model
    if dtype != "auto":
        raise BadParameter(f"dtype={dtype!r} is not possible with a GGUF file, which has its own; export it as another")
    if device not in ("auto", "cpu"):
        raise BadParameter(f"device={device!r} is not possible with a GGUF file; n_gpu_layers says what goes to a GPU")
    if device == "cpu":
        options = {"n_gpu_layers": 0, **options}
    if unknown := [name for name in options if name not in LLAMA_CPP_OPTIONS]:
        raise BadParameter(f"there is no option {unknown[0]!r}; there are {', '.join(LLAMA_CPP_OPTIONS)}")
    return model.load(path, context.LlamaCppOptions(**options))


def _transformers() -> Any:
    with needing("this model", "transformers", "torch", "transformers", "safetensors"):
        from leapahead.models.transformers import model
    return model
