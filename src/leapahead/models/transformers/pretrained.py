"""Loads models and tokenizers from a folder or the Hugging Face hub."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from huggingface_hub import HfApi, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from safetensors import SafetensorError
from transformers.distributed import DistributedConfig
from transformers.utils import cached_file, logging

from leapahead.core.errors import BadParameter, LeapaheadError, Refused, check_folder, first_line, trained_in
from leapahead.core.forks import Mutex
from leapahead.core.parameters import flag
from leapahead.models.transformers import checkpoint, devices, packing
from leapahead.models.transformers.devices import checked_device
from leapahead.models.transformers.encoder_decoder import new_target
from leapahead.models.transformers.model import TransformersTarget
from leapahead.models.transformers.static.choice import checked_mode

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# Of a repository; weights in other formats are not downloaded.
MODEL_FILES = ("*.json", "*.safetensors", "*.model", "*.tiktoken", "*.txt", "*.jinja", "*.py")
MOST_NAMED = 3  # GGUF files
HUB_SECONDS = 10.0  # for the one request that asks the hub for a model


def load(
    name_or_path: str | Path,
    *,
    name: str | None = None,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    trust_remote_code: bool = False,
    cache_tokens: int | None = None,
    exact: bool = False,
    static: str = "auto",
    pack: bool = True,
    with_tokenizer: bool = True,
    tensor_parallel: int = 1,
) -> tuple[TransformersTarget, Any]:
    """Loads a model and its tokenizer from a folder or the Hugging Face hub.

    Args:
        name_or_path: a folder with config.json, or a hub id.
        name: for reports; by default `name_or_path`.
        dtype: "auto" for the checkpoint's own, or a name of `DTYPES`.
        device: "auto" for an accelerator if there is one, else the CPU; "balanced" for the layers on all GPUs, and see
            `devices.DIVIDED`.
        trust_remote_code: whether the repository's own Python code may run.
        cache_tokens, exact, static: see `TransformersTarget`.
        pack: whether linear layers in bfloat16 on a CPU are laid out for faster products, where that is possible, see
            `linears`. An output layer that shares the embedding's weights then has a copy of them.
        with_tokenizer: whether its tokenizer is wanted.
        tensor_parallel: processes over which the weights are divided, all of which load the model together, see
            `models.parallel.tensor`; 1 for the whole model in this one.

    Returns:
        The target, and the tokenizer or None if there are no files of one.

    Raises:
        BadParameter: no such model, dtype or device, a broken file, or an impossible option.
        Refused: neither a causal language model nor an encoder-decoder model for text, or one that cannot be decoded
            exactly.
    """
    where, wanted = checked_device(device), checked_dtype(dtype)
    checked_mode(static)
    flag("pack", pack)
    with quiet():
        source, options = _source(name_or_path, "config.json", trust_remote_code)
        model, on_device = _model(source, wanted, where, options, tensor_parallel)
        tokenizer = _tokenizer(source, options) if with_tokenizer else None
    if not on_device:
        try:
            model = model.to(where)
        except torch.OutOfMemoryError as error:
            raise LeapaheadError(f"the model {source!r} does not fit on {where}; use dtype bfloat16") from error
    model.eval()
    is_divided = tensor_parallel > 1
    if pack and not is_divided:
        packing.packed(model)
    named: dict[str, Any] = {"name": name or source, "cache_tokens": cache_tokens, "is_divided": is_divided}
    target = new_target(model, exclusive=True, exact=exact, static=static, **named)
    return target, tokenizer


def load_files(
    name_or_path: str | Path, dtype: str, trust_remote_code: bool, with_tokenizer: bool = True
) -> tuple[Any, Any, Path]:
    """Loads a model on the CPU, of which no target is made.

    Args:
        name_or_path, dtype, trust_remote_code, with_tokenizer: see `load`.

    Returns:
        The model, its tokenizer or None, and the folder with the files of both.

    Raises:
        BadParameter, Refused: see `load`.
    """
    wanted = checked_dtype(dtype)
    with quiet():
        source, options = _source(name_or_path, "config.json", trust_remote_code)
        model, _ = _model(source, wanted, torch.device("cpu"), options)
        tokenizer = _tokenizer(source, options) if with_tokenizer else None
        return model.eval(), tokenizer, Path(str(cached_file(source, "config.json"))).parent


def folder_of(name_or_path: str | Path, trust_remote_code: bool) -> Path:
    """The folder with the files of a model; those of a hub id are downloaded, unless they are in the hub's cache.

    Args:
        name_or_path, trust_remote_code: see `load`.

    Raises:
        BadParameter: there is no such model, or it cannot be downloaded.
    """
    source, options = _source(name_or_path, "config.json", trust_remote_code)
    if Path(source).is_dir():
        return Path(source)
    try:
        local = bool(options.get("local_files_only"))
        return Path(snapshot_download(source, allow_patterns=list(MODEL_FILES), local_files_only=local))
    except (OSError, ValueError) as error:
        raise BadParameter(f"the model {source!r} cannot be downloaded: {first_line(error)}") from error


def save(model: Any, tokenizer: Any, folder: str | Path) -> None:
    """Writes a model as a folder of Transformers, with a tokenizer of Transformers if that is one.

    Raises:
        BadParameter: the folder cannot be written.
    """
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)  # of a file Transformers only says in its log that it is none
        with quiet(), TemporaryDirectory(prefix=".", suffix=".part", dir=path) as part:
            model.save_pretrained(part)
            if (write := getattr(tokenizer, "save_pretrained", None)) is not None:
                write(part)
            _move(Path(part), path)
    except (OSError, SafetensorError) as error:
        raise BadParameter(f"{folder} cannot be written: {getattr(error, 'strerror', None) or error}") from None


def _move(part: Path, folder: Path) -> None:
    """Moves a model that was written whole to its folder, in place of an earlier one, which may have other shards."""
    for shard in folder.glob("model-*-of-*.safetensors"):
        if not (part / shard.name).exists():
            shard.unlink()
    mode = (part / "config.json").stat().st_mode
    for file in [each for each in part.rglob("*") if each.is_file()]:
        if file.suffix == ".safetensors":
            file.chmod(mode)  # safetensors lets nobody else read what it writes
        place = folder / file.relative_to(part)
        place.parent.mkdir(exist_ok=True)
        file.replace(place)


def load_tokenizer(name_or_path: str, trust_remote_code: bool) -> Any:
    """The tokenizer of a folder or a hub id.

    Raises:
        BadParameter: there is none, or it cannot be loaded.
    """
    with quiet():
        source, options = _source(name_or_path, "tokenizer_config.json", trust_remote_code)
        try:
            return transformers.AutoTokenizer.from_pretrained(source, **options)
        except Exception as error:
            raise (
                checkpoint.tokenizer_failure(source, error)
                or BadParameter(f"the tokenizer {source!r} cannot be loaded: {first_line(error)}")
            ) from error


class Messages:
    """Transformers' progress bars and warnings, which are of the whole process: off while a thread wants none."""

    def __init__(self) -> None:
        self._lock, self._users = Mutex(), 0

    def off(self) -> None:
        """Turns them off, and keeps the settings if nobody has done so before."""
        with self._lock:
            self._users += 1
            if self._users > 1:
                return
            self._verbosity = logging.get_verbosity()
            self._bars, self._hub_bars = logging.is_progress_bar_enabled(), not are_progress_bars_disabled()
            logging.set_verbosity_error()
            logging.disable_progress_bar()  # disables the hub's too, which show a download
            if self._hub_bars:
                enable_progress_bars()

    def on(self) -> None:
        """Called once for each call of `off`; the last one restores the settings."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
            logging.set_verbosity(self._verbosity)
            if self._bars:
                logging.enable_progress_bar()
                if not self._hub_bars:
                    disable_progress_bars()


_messages = Messages()


@contextmanager
def quiet() -> Iterator[None]:
    """Without Transformers' progress bars and warnings; its settings are restored at the end."""
    _messages.off()
    try:
        yield
    finally:
        _messages.on()


def _source(name_or_path: str | Path, file: str, trust_remote_code: bool) -> tuple[str, dict[str, Any]]:
    """The folder or hub id as text, and the options of `from_pretrained` for it. `file` is one that must be there.

    The hub is asked once, since its client repeats a request that cannot be sent for half a minute.
    """
    name, folder = str(name_or_path), Path(os.path.expanduser(name_or_path))
    options: dict[str, Any] = {"trust_remote_code": flag("trust_remote_code", trust_remote_code)}
    if folder.is_dir():
        if not (folder / file).is_file():
            what = "Transformers model" if file == "config.json" else "tokenizer"
            remedy = trained_in(folder) or checkpoint.adapter_in(folder) or _gguf_in(folder)
            raise BadParameter(f"the folder {name!r} has no {file}, so it is not a {what}{remedy}")
        if file == "config.json" and (folder / "openvino_language_model.xml").is_file():
            raise Refused(
                f"the folder {name!r} has a model of text and images for OpenVINO, of which leapahead decodes none; "
                "give the folder or the hub name of a model of text, or of its original for Transformers"
            )
        return str(folder), options
    if folder.is_file():
        raise BadParameter(
            f"{name!r} is a file, but not a GGUF file; give the folder of a Transformers model, a hub id, or a GGUF "
            "file"
        )
    if folder.exists():
        raise BadParameter(
            f"{name!r} is a device or another special file; give the folder of a Transformers model, a hub id, or a "
            "GGUF file"
        )
    check_folder(name)
    is_cached = isinstance(try_to_load_from_cache(name, file), str)
    try:
        HfApi().model_info(name, timeout=HUB_SECONDS)
    except RepositoryNotFoundError as error:
        raise BadParameter(
            f"there is no folder {name!r}, and no model of that name on the Hugging Face hub that you may read; check "
            "the name, or log in with `hf auth login`"
        ) from error
    except HfHubHTTPError:
        pass  # the hub answers, and the download tells what is wrong
    except Exception as error:  # of the HTTP client, which differs from release to release: the hub is out of reach
        if not is_cached:
            raise BadParameter(
                f"there is no folder {name!r}, and the Hugging Face hub cannot be reached "
                f"({first_line(error)}); check the name or the connection"
            ) from error
        options["local_files_only"] = True
    return name, options


def _gguf_in(folder: Path) -> str:
    """For the end of a message about a folder: GGUF files in it; "" where there are none."""
    files = sorted(str(each) for each in folder.iterdir() if each.suffix.lower() == ".gguf")
    more = ", ..." if len(files) > MOST_NAMED else ""
    return f"; give a GGUF file in it: {', '.join(files[:MOST_NAMED])}{more}" if files else ""


def _model(
    source: str,
    dtype: str | torch.dtype,
    device: torch.device | str,
    options: dict[str, Any],
    tensor_parallel: int = 1,
) -> tuple[Any, bool]:
    """The model, and whether it is on the device already, as quantised and divided ones are."""
    if Path(source).is_dir():
        checkpoint.check_files(Path(source))
    try:
        config = transformers.AutoConfig.from_pretrained(source, **options)
        if config.is_encoder_decoder and type(config) not in transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING:
            raise Refused(
                f"{source} is an encoder-decoder model ({config.model_type}) of which Transformers has no class that "
                "reads text; leapahead decodes those that AutoModelForSeq2SeqLM loads"
            )
        is_quantised = checkpoint.check_quantisation(source, config)
        placed: dict[str, Any] = {"device_map": device} if is_quantised or isinstance(device, str) else {}
        if tensor_parallel > 1:
            devices.check_parallel(source, config, tensor_parallel)
            placed = {"distributed_config": DistributedConfig(tp_size=tensor_parallel)}
        # Wrong sizes are refused by the report, which names them.
        reported = {"output_loading_info": True, "ignore_mismatched_sizes": True}
        model, report = _auto_class(config).from_pretrained(
            source, config=config, dtype=dtype, **reported, **placed, **options
        )
    except LeapaheadError:
        raise
    except Exception as error:  # of a value in a configuration, or of the model's own code: of any class
        raise checkpoint.failure(source, error, options["trust_remote_code"]) from error
    checkpoint.check_report(source, report, config)
    return model, bool(placed)


def _tokenizer(source: str, options: dict[str, Any]) -> Any:
    """The tokenizer, or None where there are no files of one."""
    try:
        return transformers.AutoTokenizer.from_pretrained(source, **options)
    except Exception as error:
        if (failure := checkpoint.tokenizer_failure(source, error)) is not None:
            raise failure from error
        return None


def _auto_class(config: Any) -> Any:
    """What loads a model of this configuration: a multimodal one without a class for its text part is loaded whole."""
    if config.is_encoder_decoder:
        return transformers.AutoModelForSeq2SeqLM
    if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return transformers.AutoModelForCausalLM
    if type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM  # the repository's own code, or none


def checked_dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    """What `from_pretrained` takes.

    Raises:
        BadParameter: no such dtype.
    """
    if dtype == "auto" or (isinstance(dtype, torch.dtype) and dtype in DTYPES.values()):
        return dtype
    if isinstance(dtype, str) and dtype in DTYPES:
        return DTYPES[dtype]
    raise BadParameter(f"dtype {str(dtype)!r} is not possible; there are auto, {', '.join(DTYPES)}")
