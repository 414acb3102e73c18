"""What is wrong with the files of a model, in one sentence: weights, configurations, adapters, code and tokenizer."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers.quantizers.auto import AutoHfQuantizer

from leapahead.core.errors import BadParameter, Refused, first_line

ADAPTER = "adapter_config.json"
GENERATION = "generation_config.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.*", "*.model", "*.tiktoken", "tekken.json")
KNOWN = (OSError, ValueError, ImportError, RuntimeError)  # whose text is written for the user
MOST_NAMED = 3  # weights


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
        BadParameter: it has an adapter and no weights of a model, or a configuration that cannot be read.
    """
    weights = [each for kind in ("*.safetensors", "*.bin") for each in folder.glob(kind)]
    if (adapter := adapter_in(folder)) and all(each.name.startswith("adapter_model") for each in weights):
        raise BadParameter(f"the folder {str(folder)!r} has no weights of a whole model{adapter}")
    for file in (folder / GENERATION, folder / ADAPTER):
        if file.is_file() and (reason := _not_json(file)):
            raise BadParameter(f"{file} cannot be read ({reason}): repair it, or remove it if the model needs none")


def check_quantisation(source: str, config: Any) -> bool:
    """Whether a configuration is of a quantised model.

    Raises:
        Refused: it is quantised by a method that Transformers does not know, and would ignore.
    """
    found = getattr(config, "quantization_config", None)
    if isinstance(found, dict) and not AutoHfQuantizer.supports_quant_method(found):
        raise Refused(
            f"{source} is quantised by {found.get('quant_method')!r} (quantization_config of config.json), which "
            "Transformers does not know; use a model that is not quantised, or another method"
        )
    return found is not None


def check_report(source: str, report: dict[str, Any]) -> None:
    """Refuses or warns by what Transformers reports of the weights that it has loaded.

    Raises:
        Refused: weights are missing, or have other sizes than the configuration says.
    """
    if wrong := sorted(report["mismatched_keys"]):
        name, there, expected = wrong[0]
        more = f" ({len(wrong)} weights have other sizes)" if len(wrong) > 1 else ""
        raise Refused(
            f"the weights of {source!r} do not fit its config.json: {name} is {_sizes(there)} and not "
            f"{_sizes(expected)}{more}; correct config.json, or download or save the model again"
        )
    if missing := sorted(report["missing_keys"]):
        some = ", ".join(missing[:MOST_NAMED])
        raise Refused(f"the checkpoint {source!r} lacks weights ({some}, ...), so it is not a whole language model")
    if unused := sorted(report["unexpected_keys"]):
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
    if isinstance(error, SafetensorError):
        return BadParameter(f"{_broken_in(source)} is broken ({text}): download or save it again")
    if isinstance(error, StrictDataclassError):  # the first line names the field, the second one what is wrong
        lines = [line.strip() for line in str(error).splitlines()]
        return BadParameter(f"{what} by its config.json: {lines[1] if len(lines) > 1 else text}")
    if isinstance(error, KNOWN):
        return BadParameter(f"{what}: {text}")
    which = (
        "its config.json or its own Python code" if own_code else "its config.json, in which a value is not possible"
    )
    return BadParameter(f"{what} by {which} ({type(error).__name__}: {text})")


def tokenizer_failure(source: str, error: Exception) -> BadParameter | None:
    """Why a tokenizer cannot be loaded; None where there is none."""
    folder = folder_of(source)
    if folder is None or not any(True for kind in TOKENIZER_FILES for _ in folder.glob(kind)):
        return None
    what = first_line(error) if isinstance(error, KNOWN) else f"{type(error).__name__}: {first_line(error)}"
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
