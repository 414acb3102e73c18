"""What is wrong with the files of a model, in one sentence: weights, configurations, adapters, code and tokenizer."""

from __future__ import annotations

import json
import re
import sys
import warnings
from pathlib import Path
from traceback import walk_tb
from typing import Any
from zipfile import is_zipfile

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers.quantizers.auto import AutoHfQuantizer
from transformers.utils import is_peft_available

from leapahead.core.errors import BadParameter, Refused, first_line

ADAPTER = "adapter_config.json"
GENERATION = "generation_config.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.*", "*.model", "*.tiktoken", "tekken.json")
KNOWN = (OSError, ValueError, ImportError, RuntimeError)  # whose text is written for the user
MOST_NAMED = 3  # weights
NO_WEIGHTS = ("training_args.bin", "optimizer.bin", "scheduler.bin")
WHOLE = ("model.safetensors", "pytorch_model.bin")  # Transformers reads the first one that is there, or its index
# Buffers that older releases of Transformers saved, and that newer ones compute.
BUFFERS = re.compile(
    r"\.(attn|attention)\.(masked_)?bias$|(^|\.)(encoder|decoder)\.version$|embed_positions\.weights?$"
    r"|rotary_emb\.inv_freq$|position_ids$"
)
LAYER = re.compile(r"(?:^|\.)(?:model|language_model)\.layers\.(\d+)\.")


def folder_of(source: str) -> Path | None:
    """The folder with the files of a folder or a hub id; None where nothing is downloaded."""
    if Path(source).is_dir():
        return Path(source)
    found = (try_to_load_from_cache(source, file) for file in ("config.json", "tokenizer_config.json"))
    return next((Path(file).parent for file in found if isinstance(file, str)), None)


def adapter_in(folder: Path) -> str:
    """For the end of a message about a folder without a whole model: the PEFT adapter in it; "" where there is none."""
    if not (folder / ADAPTER).is_file():
        return ""
    try:
        base = str(json.loads((folder / ADAPTER).read_bytes())["base_model_name_or_path"])
    except (OSError, ValueError, KeyError, TypeError):
        base = "another model"
    return (
        f"; by its {ADAPTER} it is an adapter of {base}: save the result of PEFT's merge_and_unload as a model, or "
        "give the loaded PEFT model to LLM(...)"
    )


def check_files(folder: Path) -> None:
    """Refuses a folder whose files Transformers would ignore, or read as other than they are.

    Raises:
        BadParameter: it has an adapter and no weights of a model, an adapter that would be left out, or a
            configuration or an index that cannot be read.
    """
    weights = [file for kind in ("*.safetensors", "*.bin") for file in folder.glob(kind) if file.name not in NO_WEIGHTS]
    adapters = [file for file in weights if file.name.startswith("adapter_model")]
    if (adapter := adapter_in(folder)) and len(adapters) == len(weights):
        raise BadParameter(f"the folder {str(folder)!r} has no weights of a whole model{adapter}")
    for file in (folder / GENERATION, folder / ADAPTER):
        if file.is_file() and (reason := _not_json(file)):
            raise BadParameter(f"{file} cannot be read ({reason}): repair it, or remove it if the model needs none")
    config = folder / "config.json"
    found = None if _not_json(config) else json.loads(config.read_bytes()).get("quantization_config")
    if not isinstance(found, dict | None):
        raise BadParameter(
            f"quantization_config={found!r} of {config} is no JSON object: correct it, or remove it if the model "
            "is not quantised"
        )
    if adapter and not adapters:
        raise BadParameter(
            f"the folder {str(folder)!r} has the weights of a model and {ADAPTER}, but no weights of the adapter: "
            f"remove {ADAPTER}, or download adapter_model.safetensors"
        )
    if adapter and not is_peft_available():
        raise BadParameter(
            f"the model in {str(folder)!r} has an adapter, which is applied only with the package peft: install it, "
            f"merge the adapter, or remove {ADAPTER}"
        )
    for name in WHOLE:
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            break
        if index.is_file():
            if reason := _no_index(index):
                raise BadParameter(f"{index} cannot be read ({reason}): download or save it again")
            break


def check_quantisation(source: str, config: Any) -> bool:
    """Whether a configuration is of a quantised model.

    Raises:
        BadParameter: quantization_config names no method.
        Refused: it is quantised by a method that Transformers does not know, and would ignore.
    """
    found = getattr(config, "quantization_config", None)
    if isinstance(found, dict) and not any(found.get(key) for key in ("quant_method", "load_in_8bit", "load_in_4bit")):
        raise BadParameter(
            f"quantization_config={found!r} in the config.json of {source!r} has no quant_method; name the method, or "
            "remove quantization_config if the model is not quantised"
        )
    if isinstance(found, dict) and not AutoHfQuantizer.supports_quant_method(found):
        raise Refused(
            f"{source} is quantised by {found.get('quant_method')!r} (quantization_config of config.json), which "
            "Transformers does not know; use a model that is not quantised, or another method"
        )
    return found is not None


def check_report(source: str, report: dict[str, Any], config: Any) -> None:
    """Refuses or warns by what Transformers reports of the weights that it has loaded.

    Raises:
        Refused: weights are missing, or have other sizes than the configuration says.
    """
    wrong, missing = sorted(report["mismatched_keys"]), sorted(report["missing_keys"])
    unfit = next((name for name in (*(each[0] for each in wrong), *missing) if ".lora_" in name), None)
    if unfit and (folder := folder_of(source)) is not None and (folder / ADAPTER).is_file():
        raise Refused(
            f"the adapter in {source!r} does not fit the model ({unfit} is missing or has another size); use an "
            f"adapter of this model, or remove {ADAPTER}"
        )
    if wrong:
        name, there, expected = wrong[0]
        more = f" ({len(wrong)} weights have other sizes)" if len(wrong) > 1 else ""
        raise Refused(
            f"the weights of {source!r} do not fit its config.json: {name} is {_sizes(there)} and not "
            f"{_sizes(expected)}{more}; correct config.json, or download or save the model again"
        )
    if missing:
        some = ", ".join(missing[:MOST_NAMED])
        raise Refused(f"the checkpoint {source!r} lacks weights ({some}, ...), so it is not a whole language model")
    if unused := _unused(report["unexpected_keys"], config):
        some = ", ".join(unused[:MOST_NAMED]) + (", ..." if len(unused) > MOST_NAMED else "")
        warnings.warn(
            f"{source} has weights that a model of its config.json does not use ({some}); if its texts are wrong, "
            "compare num_hidden_layers and the like with those of the original model",
            stacklevel=2,
        )


def failure(source: str, error: Exception, own_code: bool) -> BadParameter:
    """Why a model cannot be loaded.

    Args:
        own_code: whether Python code that comes with the model may run.
    """
    what, text = f"the model {source!r} cannot be loaded", first_line(error)
    if "trust_remote_code" in str(error) and not own_code:
        return BadParameter(f"{what}: it comes with Python code; read it, and allow it with trust_remote_code=True")
    if sys.flags.optimize > 1 and _passed(error, "transformers.utils.auto_docstring"):
        return BadParameter(f"{what}, since Transformers needs docstrings: run Python with -O instead of -OO")
    if isinstance(error, SafetensorError):
        return BadParameter(f"{_broken_in(source)} is broken ({text}): download or save it again")
    if _passed(error, "torch.serialization") and (file := _broken_bin(source)) is not None:
        # PyTorch's text may tell to load it with weights_only=False, which would run code in it.
        return BadParameter(f"{file} is broken, or no file of weights: download or save it again")
    if isinstance(error, StrictDataclassError):  # the first line names the field, the second one what is wrong
        lines = [line.strip() for line in str(error).splitlines()]
        return BadParameter(f"{what} by its config.json: {lines[1] if len(lines) > 1 else text}")
    if own_code and _passed(error, "transformers_modules."):
        which = "its own Python code"
    elif isinstance(error, KNOWN):
        return BadParameter(f"{what}: {text}")
    elif own_code:
        which = "its config.json or its own Python code"
    else:
        which = "its config.json, in which a value is not possible"
    return BadParameter(f"{what} by {which} ({type(error).__name__}: {text})")


def tokenizer_failure(source: str, error: Exception) -> BadParameter | None:
    """Why a tokenizer cannot be loaded; None where there is none."""
    folder = folder_of(source)
    if folder is None or not any(True for kind in TOKENIZER_FILES for _ in folder.glob(kind)):
        return None
    what = first_line(error) if isinstance(error, KNOWN) else f"{type(error).__name__}: {first_line(error)}"
    if what.rstrip().endswith(":"):  # what it could be made of follows in further lines
        is_there = any(file.name != "tokenizer_config.json" for kind in TOKENIZER_FILES for file in folder.glob(kind))
        what = " ".join(str(error).split()) if is_there else "there is no tokenizer.json or vocabulary"
    if broken := next((file for file in sorted(folder.glob("tokenizer*.json")) if _not_json(file)), None):
        return BadParameter(f"{broken} cannot be read ({_not_json(broken)}): save or download it again")
    remedy = "" if isinstance(error, ImportError) else "; save or download its files again"  # a package is missing
    return BadParameter(f"the tokenizer of {source!r} cannot be loaded ({what}){remedy}")


def _not_json(file: Path) -> str:
    """Why a file holds no JSON object; "" where it does."""
    try:
        return "" if isinstance(json.loads(file.read_bytes()), dict) else "it is no JSON object"
    except (OSError, ValueError) as error:
        return first_line(error)


def _no_index(file: Path) -> str:
    """Why a file is no index of weights; "" where it is one."""
    if reason := _not_json(file):
        return reason
    found = json.loads(file.read_bytes())
    if not isinstance(found.get("metadata"), dict):
        return "it has no metadata"
    return (
        "" if found.get("weight_map") and isinstance(found["weight_map"], dict) else "its weight_map names no weights"
    )


def _unused(names: Any, config: Any) -> list[str]:
    """Weights that no model of a configuration uses, without former buffers and the layers of its MTP modules."""
    text = config.get_text_config(decoder=True)
    layers, more = (getattr(text, name, None) for name in ("num_hidden_layers", "num_nextn_predict_layers"))
    mtp = range(layers, layers + more) if isinstance(layers, int) and isinstance(more, int) else ()
    return sorted(
        name
        for name in names
        if not BUFFERS.search(name) and not ((found := LAYER.search(name)) and int(found[1]) in mtp)
    )


def _broken_bin(source: str) -> Path | None:
    """The file of weights in PyTorch's format that is broken, of those that Transformers reads; None without any."""
    folder = folder_of(source)
    if folder is None:
        return None
    kind = "adapter_model*.bin" if any(True for _ in folder.glob("*.safetensors")) else "*.bin"
    files = [file for file in sorted(folder.glob(kind)) if file.name not in NO_WEIGHTS]
    return next((file for file in files if not is_zipfile(file)), next(iter(files), None))


def _passed(error: Exception, modules: str) -> bool:
    """Whether an error was raised in modules whose names begin so, or in what they called."""
    frames = walk_tb(error.__traceback__)
    return any(str(frame.f_globals.get("__name__")).startswith(modules) for frame, _ in frames)


def _broken_in(source: str) -> str:
    """The first file of weights that cannot be opened; the model itself where all can."""
    folder = folder_of(source)
    for file in sorted(folder.glob("*.safetensors") if folder is not None else ()):
        try:
            with safe_open(file, framework="pt"):
                pass
        except (OSError, SafetensorError):
            return str(file)
    return f"the model {source!r}"


def _sizes(shape: Any) -> str:
    return "x".join(map(str, shape))
