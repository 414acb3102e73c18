"""Makes a target of what names or is a model: None (the bundled model), a name or path, a module, a target.

A backend is imported when a model of its kind is loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, cast

from leapahead.core import openmp
from leapahead.core.errors import BadParameter, Refused, check_folder, needing
from leapahead.core.parameters import file_path, flag, is_whole
from leapahead.core.text import Tokenizer
from leapahead.models import origin
from leapahead.models.base import HoldsResources, Target
from leapahead.models.llama_cpp.file import check_file, is_gguf
from leapahead.models.llama_cpp.options import LlamaCppOptions
from leapahead.models.openvino.options import OpenVinoOptions, is_openvino

BUNDLED = "bundled"
ENGINES = ("auto", "transformers", "llama.cpp", "openvino")
LLAMA_CPP_OPTIONS = tuple(LlamaCppOptions.__dataclass_fields__)  # for a GGUF file only
OPENVINO_OPTIONS = tuple(name for name in OpenVinoOptions.__dataclass_fields__ if name != "cache_tokens")
WEIGHTS = "weights"  # of a model that is exported for OpenVINO
DEVICES = "devices"  # of a model of Transformers that is given by its name
TENSOR_PARALLEL = "tensor_parallel"  # the same
STATIC = "static"  # of a model of Transformers
PACK = "pack"  # of a model of Transformers that is given by its name
OPTIONS_OF = {
    "transformers": (DEVICES, TENSOR_PARALLEL, STATIC, PACK),
    "module": (STATIC,),
    "llama.cpp": LLAMA_CPP_OPTIONS,
    "openvino": (*OPENVINO_OPTIONS, WEIGHTS),
}
COMMON_OPTIONS = ("dtype", "device", "exact", "trust_remote_code", "cache_tokens")  # arguments of `load` beside these
# What only some engines have.
ENGINE_OPTIONS = tuple(dict.fromkeys((*LLAMA_CPP_OPTIONS, *OPENVINO_OPTIONS, WEIGHTS, *OPTIONS_OF["transformers"])))


@dataclass(frozen=True)
class Loaded:
    """A target and what came with it.

    Attributes:
        eos_token_ids: of the generation config, the config and the tokenizer together, which often differ.
    """

    target: Target
    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]


@openmp.watched()  # also of the forwards that test the model
def load(
    model: Any = None,
    *,
    engine: str = "auto",
    tokenizer: Tokenizer | str | Path | None = None,
    dtype: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    cache_tokens: int | None = None,
    exact: bool = False,
    sequences: int | None = None,
    branching: str = "",
    cells: int = 0,
    **options: Any,
) -> Loaded:
    """Loads a target.

    Args:
        model: None or "bundled" for the bundled one, a hub name or a folder, an OpenVINO folder, a GGUF file, a loaded
            `torch.nn.Module`, or a `Target`.
        engine: what computes: "transformers", "llama.cpp", "openvino", or "auto": OpenVINO for its own folders,
            llama.cpp for GGUF files, Transformers for all others. OpenVINO takes GGUF files and folders of Transformers
            too, which are converted once.
        tokenizer: instead of the model's own; or the name or folder of one.
        dtype, device: for a name or path; a loaded model is not changed.
        trust_remote_code: whether Python code that comes with the model may run.
        cache_tokens: of the KV cache, see `TransformersTarget`; not of a GGUF file's, which has `n_ctx` tokens.
        exact: whether a token's logits must be the same bits with every draft, batch and schedule.
        sequences, branching, cells: see `llama_cpp.form.load`.
        options: of the engine: for llama.cpp see `LlamaCppOptions`, for OpenVINO `OpenVinoOptions`, and `weights`, the
            type that a folder of Transformers is exported with: f32, bf16 (by default), int8 or int4. For Transformers
            `devices`: over which the branches of every tree are divided, each with the whole model: "cuda:0,cuda:1", a
            list, or "torchrun" for the processes that torchrun started (see `models.parallel`), `tensor_parallel`:
            whether the weights are divided over `devices` instead, `static`: whether forwards are captured as CUDA
            graphs or compiled (see `TransformersTarget`), and `pack`: whether linear layers are laid out for faster
            products on a CPU (see `models.transformers.linears`; by default true).

    Raises:
        LeapaheadError: no such model, one that cannot be decoded or lacks an option, or a package is not installed.
    """
    exact, trust_remote_code = flag("exact", exact), flag("trust_remote_code", trust_remote_code)
    if isinstance(model, str) and model == BUNDLED:
        model = None
    kind, found, ends = engine_of(model, engine), None, tuple[int, ...]()
    place = {"engine": engine, "dtype": dtype, "device": device, "trust_remote_code": trust_remote_code, **options}
    _refuse_options(kind, model, options, cache_tokens)
    if isinstance(tokenizer, (str, Path)):  # before the model, whose load may take long
        tokenizer = load_tokenizer(str(tokenizer), trust_remote_code)
    elif tokenizer is not None and not all(hasattr(tokenizer, each) for each in ("encode", "decode", "eos_token_id")):
        what = "a loaded one, such as those of Transformers, or its name or folder"
        raise BadParameter(f"a tokenizer must be {what}, got {type(tokenizer).__name__}")
    if kind == "llama.cpp":
        cache = {"sequences": sequences, "branching": branching, "cells": cells}
        target, gguf_tokenizer = _gguf(model, dtype, device, exact, cache, options)
        if target.info.cache_tokens > target.info.context_length:
            place["cells"] = target.info.cache_tokens  # of all its texts, for a draft model that has one cache
        found, ends = gguf_tokenizer, gguf_tokenizer.end_token_ids
    elif kind == "openvino":
        target, found, ends = _openvino(
            model, dtype, device, trust_remote_code, cache_tokens, exact, options, tokenizer is None
        )
    elif kind == "module":
        target = _module_target(model, cache_tokens=cache_tokens, exact=exact, **options)
    elif kind == "target":
        if exact and not model.info.exact:
            raise BadParameter(f"exact=True is not possible with the target {model.info.name!r}, which is not exact")
        target = model
    else:
        names, is_divided = options.pop(DEVICES, None), flag(TENSOR_PARALLEL, options.pop(TENSOR_PARALLEL, False))
        given = {"name_or_path": str(model or bundled()), "name": str(model or BUNDLED), "exact": exact, **options}
        given |= {"dtype": dtype, "trust_remote_code": trust_remote_code, "cache_tokens": cache_tokens}
        load_on = partial(_pretrained().load, with_tokenizer=tokenizer is None, **given)
        if names is None and is_divided:
            raise BadParameter("tensor_parallel=True needs devices, over which weights are divided, as 'cuda:0,cuda:1'")
        if names is None:
            target, found = load_on(device=device)
        elif device != "auto":
            raise BadParameter(f"device={device!r} is not possible with devices={names!r}; leave out one of them")
        else:
            target, found = _launch(names, load_on, {**given, "dtype": str(dtype).removeprefix("torch.")}, is_divided)
    if kind in ENGINES:
        origin.remember(target, **place)
    found = found if tokenizer is None else tokenizer
    return Loaded(target, found, tuple(dict.fromkeys((*ends, *eos_token_ids(target, found)))))


def engine_of(model: Any, engine: str = "auto") -> str:
    """What computes a model: "transformers", "llama.cpp" or "openvino"; "module" or "target" of what is loaded.

    Raises:
        BadParameter: no such engine, or one that cannot compute this model; what is no model.
    """
    if engine not in ENGINES:
        raise BadParameter(f"engine={engine!r} is not possible; choose one of {', '.join(ENGINES)}")
    if isinstance(model, str) and not model.strip():
        raise BadParameter(f"model={model!r} is not possible: give a hub name, a folder or a file, or {BUNDLED!r}")
    if model is None or isinstance(model, (str, Path)):
        usual = "llama.cpp" if is_gguf(model) else "openvino" if is_openvino(model) else "transformers"
        if engine in ("auto", usual):
            return usual
        if engine == "openvino":
            return engine
        remedy = {
            "transformers": "name a folder or a hub name of Transformers",
            "llama.cpp": "export the model as a GGUF file with `leapahead export-gguf`",
        }
        raise BadParameter(f"engine={engine!r} cannot compute {str(model or BUNDLED)!r}; {remedy[engine]}")
    if _is_module(model) or isinstance(model, Target):
        if engine not in ("auto", "transformers"):
            raise BadParameter(f"engine={engine!r} is not possible for a model that is loaded already; name its folder")
        return "module" if _is_module(model) else "target"
    what = "a name, a path, a loaded Transformers model or a leapahead target"
    raise BadParameter(f"a model must be {what}, got {type(model).__name__}{origin.lacking(model)}")


def check(model: Any = None, *, engine: str = "auto", **options: Any) -> None:
    """Refuses arguments of `load` that are not possible for a model, as far as they can be told without loading it.

    Raises:
        BadParameter: no such engine or option, or one that the model's engine does not have; a value out of its range.
    """
    for name in ("exact", "trust_remote_code"):
        flag(name, options.get(name, False))
    kind = engine_of(model, engine)
    given = {name: value for name, value in options.items() if name not in COMMON_OPTIONS}
    _refuse_options(kind, model, given, options.get("cache_tokens"))
    given.pop(WEIGHTS, None)
    if kind == "llama.cpp":
        LlamaCppOptions(**given)
    elif kind == "openvino":
        OpenVinoOptions(**given)


def check_loaded(model: Any, dtype: str, device: str) -> None:
    """Refuses a type or a device that a loaded model does not have, since a loaded model is not changed.

    Raises:
        BadParameter: it is loaded, and has another one.
    """
    if model is None or isinstance(model, (str, Path)):
        return
    own = next(model.parameters(), None) if _is_module(model) else None
    types, places = ["auto"], ["auto"]
    if own is not None:
        types.append(str(getattr(model, "dtype", own.dtype)).removeprefix("torch."))
        places += [own.device.type, str(own.device)]
    for name, value, possible in (("dtype", dtype, types), ("device", device, places)):
        if value not in possible:
            has = f", which has {possible[-1]}" if own is not None else ""
            raise BadParameter(
                f"{name}={value!r} is not possible for a model that is loaded already{has}, and is not changed here; "
                f"leave {name} out, and load or move the model as you want it"
            )


def check_place(model: str | Path) -> None:
    """Refuses a name or path of a model where none can be, as far as that can be told without loading it.

    Raises:
        BadParameter: there is no such file or folder, or the file is no complete GGUF file.
    """
    if engine_of(model) == "llama.cpp":
        check_file(file_path("model", model))
    else:
        check_folder(model)


def _refuse_options(kind: str, model: Any, options: dict[str, Any], cache_tokens: int | None) -> None:
    """Refuses options that the engine does not have."""
    if unknown := [name for name in options if name not in ENGINE_OPTIONS]:
        raise BadParameter(f"there is no option {unknown[0]!r}; there are {', '.join(ENGINE_OPTIONS)}")
    wrong = [name for name in options if name not in OPTIONS_OF.get(kind, ())]
    if wrong:
        kinds = {
            "llama.cpp": "a GGUF file",
            "openvino": "an OpenVINO model (engine='openvino')",
            "transformers": "a model of Transformers given by name or folder",
        }
        owners = " or ".join(what for each, what in kinds.items() if wrong[0] in OPTIONS_OF[each])
        what = repr(model or BUNDLED) if isinstance(model, (str, Path, type(None))) else "a loaded one"
        what += " under OpenVINO" if kind == "openvino" else ""  # which a GGUF file may be, too
        given = ", ".join(f"{name}={options[name]!r}" for name in wrong)
        raise BadParameter(f"{given} can be set for {owners} only, not for {what}")
    if cache_tokens is not None and kind in ("llama.cpp", "target"):
        raise BadParameter(
            f"cache_tokens={cache_tokens} is for Transformers and OpenVINO models that are loaded here; set n_ctx for "
            "a GGUF file"
        )


def close(target: Target) -> None:
    """Ends the processes that compute for a target, and releases memory that it keeps, if there are any."""
    if isinstance(target, HoldsResources):
        target.close()


def bundled(name: str = "tiny") -> str:
    """The folder of the bundled model, or of its draft model ("tiny-draft")."""
    folder = Path(str(resources.files("leapahead"))) / "assets" / name
    if not (folder / "config.json").is_file():
        raise Refused("this installation has no bundled model; name a model (--model, or LLM('name or path'))")
    return str(folder)


def eos_token_ids(target: Target, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Every id that ends a text by the tokenizer or a configuration, except ids outside the vocabulary.

    Raises:
        BadParameter: one is no token id.
    """
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
        several = isinstance(claim, Iterable) and not isinstance(claim, (str, dict))
        for token in claim if several else [claim]:
            if token is not None and not is_whole(token):
                raise BadParameter(
                    f"eos_token_id={claim!r} of the model's configuration is not possible: it must be a token id, or a "
                    "list of them; correct generation_config.json or config.json"
                )
            if token is not None and 0 <= token < target.info.vocab_size:
                ids[int(token)] = None
    return tuple(ids)


def gguf_tokenizer(path: str) -> Tokenizer:
    """The tokenizer of a GGUF file, read without its weights.

    Raises:
        LeapaheadError: the file is missing or broken, or llama-cpp-python is not installed.
    """
    check_place(path)  # before what is not installed
    with needing("a GGUF file", "llama-cpp", "llama_cpp"):
        from leapahead.models.llama_cpp import tokenizer
    return tokenizer.read_tokenizer(path)


def load_tokenizer(name: str, trust_remote_code: bool) -> Tokenizer:
    """The tokenizer of a folder or a hub id, of a GGUF file, or of the bundled model ("bundled").

    Raises:
        LeapaheadError: it cannot be loaded.
    """
    if is_gguf(name):
        return gguf_tokenizer(name)
    return cast(Tokenizer, _pretrained().load_tokenizer(bundled() if name == BUNDLED else name, trust_remote_code))


def _is_module(model: object) -> bool:
    torch = sys.modules.get("torch")  # a module exists only where torch has been imported
    return torch is not None and isinstance(model, torch.nn.Module)


def _gguf(
    path: str | Path, dtype: str, device: str, exact: bool, cache: dict[str, Any], options: dict[str, Any]
) -> Any:
    check_place(path)  # before what is not installed
    with needing("a GGUF file", "llama-cpp", "llama_cpp"):
        from leapahead.models.llama_cpp import exact as exact_mode
        from leapahead.models.llama_cpp import form, model
    if dtype != "auto":
        raise BadParameter(f"dtype={dtype!r} is not possible with a GGUF file, which has its own; export it as another")
    if device not in ("auto", "cpu"):
        raise BadParameter(f"device={device!r} is not possible with a GGUF file; n_gpu_layers says what goes to a GPU")
    if device == "cpu" or exact:
        options = {"n_gpu_layers": 0, **options}
    settings = LlamaCppOptions(**options)
    if exact:
        return model.load(path, settings, exact_mode.ExactLlamaCppTarget)
    return form.load(path, settings, **cache)


def _openvino(
    model: Any,
    dtype: str,
    device: str,
    trust_remote_code: bool,
    cache_tokens: int | None,
    exact: bool,
    options: dict[str, Any],
    wants_tokenizer: bool,
) -> tuple[Target, Tokenizer | None, tuple[int, ...]]:
    """A model under OpenVINO, its tokenizer and the tokens that end a text."""
    if model is not None:
        check_place(model)  # before what is not installed
    with needing("OpenVINO", "openvino", "openvino", "openvino_genai"):
        from leapahead.models.openvino import folder
    if dtype != "auto":
        raise BadParameter(f"dtype={dtype!r} is not possible with OpenVINO; give weights or precision")
    if device not in ("auto", "cpu"):
        raise BadParameter(f"device={device!r} is not possible with OpenVINO, which computes on the CPU here")
    weights = options.pop(WEIGHTS, None)
    settings = OpenVinoOptions(cache_tokens=cache_tokens, **options)
    path = folder.converted(model if model is not None else bundled(), weights, trust_remote_code, wants_tokenizer)
    target = folder.load(path, settings, exact=exact, name=str(BUNDLED if model is None else model))
    found = (
        folder.tokenizer(path, partial(load_tokenizer, trust_remote_code=trust_remote_code))
        if wants_tokenizer
        else None
    )
    # llama.cpp finds end tokens that the metadata of a GGUF file do not name.
    return target, found, (*folder.describe(path).end_token_ids, *getattr(found, "end_token_ids", ()))


def _module_target(model: Any, **options: Any) -> Target:
    with needing("this model", "transformers", "torch", "transformers", "safetensors"):
        from leapahead.models.transformers import encoder_decoder
    target: Target = encoder_decoder.new_target(model, **options)
    return target


def _launch(
    devices: Any, load_on: Callable[..., Any], options: dict[str, Any], tensor_parallel: bool
) -> tuple[Target, Tokenizer | None]:
    """A model of Transformers on several devices, and its tokenizer."""
    from leapahead.models.parallel import launch

    return launch.launched(devices, lambda name, **more: load_on(device=name, **more), options, tensor_parallel)


def _pretrained() -> Any:
    with needing("this model", "transformers", "torch", "transformers", "safetensors"):
        import torch  # noqa: F401
        import transformers

        from leapahead.models.transformers import require_version

        require_version(transformers.__version__)
        from leapahead.models.transformers import pretrained
    return pretrained
