"""Exports a model of Transformers as a folder for OpenVINO: a graph, its weights, the tokenizer, the configuration.

    weights of the model  ->  openvino_model.xml, .bin       refused: families whose logits would differ
    tokenizer             ->  openvino_tokenizer.xml, ...    left out where OpenVINO would tokenize differently
    config.json, ...      ->  the same files, with named chat templates and code of the tokenizer

The folder is of the kind that OpenVINO GenAI and Optimum Intel read. int8 and int4 are made by NNCF from the weights of
the checkpoint, after the graph was compared with the model. The folder appears under its name when it is complete.

This module does not decode. The graph is made by `leapahead.models.openvino.graph`.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from leapahead.core.errors import BadParameter, LeapaheadError, Refused, first_line, needing
from leapahead.models.llama_cpp.file import is_gguf
from leapahead.models.openvino import store
from leapahead.models.openvino.options import MODEL, is_openvino

Progress = Callable[[str, int, int], None]  # what is being done, done, total

WEIGHTS = ("f32", "bf16", "int8", "int4")
USUAL = "bf16"
DTYPES = {"f32": "float32", "bf16": "bfloat16"}  # others are made from the checkpoint's own type
PACKAGES = ("openvino", "openvino_tokenizers", "openvino_genai")
GROUP = 128  # neighbouring numbers of a row that share a scale in int4; fewer where rows are no multiple of it
FILES = (
    *("config.json", "generation_config.json", "chat_template*", "additional_chat_templates/*.jinja"),
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model", "*.tiktoken"),
    *("tekken.json", "*.py"),  # code is run with trust_remote_code only
)
STAGES = ("loading", "converting", "compressing", "writing")

# What the tokenizer as a graph must split as the model's own: code, punctuation, digits, spaces, other scripts.
TEXTS = (
    "def f(x):\n\treturn x ** 2  # square\n\n\nprint(f(3.14159), \"don't\", I'LL)",
    "    four spaces,  two   three \n \n  \n\n trailing   ",
    "Ünïcödé café 日本語 русский العربية हिन्दी 1234567890",
    "😀👩‍👩‍👧🇩🇪👍🏽 €$£ “quotes” … — ~`^|\\<>{}[]",
)


@dataclass(frozen=True)
class Exported:
    """A written folder.

    Attributes:
        path: of the folder.
        weights: one of `WEIGHTS`, or "GGUF" for those of such a file.
        size: of the weights, in bytes.
        no_tokenizer: why the folder has no tokenizer as a graph, as a clause; "" where it has one. Programs without
            Transformers can use such a folder with token ids only.
    """

    path: Path
    weights: str
    size: int
    no_tokenizer: str = ""


def export(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str],
    weights: str = "bf16",
    *,
    force: bool = False,
    progress: Progress | None = None,
    trust_remote_code: bool = False,
) -> Exported:
    """Writes a model of Transformers as a folder for OpenVINO.

    In memory are the weights once in the type that they are loaded in, and once in float32 while they are compared.

    Args:
        model: a folder with config.json and safetensors, or a name on the Hugging Face hub.
        out: the folder to write; the folder around it must exist.
        weights: "f32" or "bf16" (exact, or rounded to nearest even); "int8" (one scale per row) or "int4" (one scale
            per `GROUP` numbers of a row, and int8 where that is more sensitive), both by NNCF without data.
        force: replace `out` if it is such a folder.
        progress: called with (what, done, total) at every stage.
        trust_remote_code: whether the repository's own Python code may run.

    Raises:
        BadParameter: no such model or type of weights, or `out` cannot be written.
        Refused: a model that OpenVINO cannot convert such that it gives the model's own logits.
        LeapaheadError: a package that is needed is not installed.
    """
    out, report = Path(out), progress or (lambda what, done, total: None)
    _check_arguments(model, weights)
    _need(weights)
    with store.written(out, force) as folder:
        size, no_tokenizer = _write(model, folder, weights, report, trust_remote_code)
    return Exported(out, weights, size, no_tokenizer)


def cached_export(
    model: str | os.PathLike[str],
    weights: str = "bf16",
    *,
    progress: Progress | None = None,
    trust_remote_code: bool = False,
    with_tokenizer: bool = True,
) -> Path:
    """A model of Transformers as a folder for OpenVINO in the cache folder, written there the first time.

    Args:
        model: a folder with config.json and safetensors, or a name on the Hugging Face hub.
        weights, progress, trust_remote_code: see `export`.
        with_tokenizer: whether its tokenizer is wanted; without, its files are copied and not read.

    Raises:
        LeapaheadError: see `export`.
    """
    report = progress or (lambda what, done, total: None)
    _check_arguments(model, weights)
    _need(weights)
    from leapahead.models.transformers import pretrained

    source = pretrained.folder_of(Path(model) if isinstance(model, os.PathLike) else model, trust_remote_code)

    def make(made: Path) -> None:
        _write(source, made, weights, report, trust_remote_code, with_tokenizer)

    files = _matching(source, *FILES, "adapter_config.json", "*.safetensors", "*.bin")
    return store.kept(source, files, weights, make)


def _matching(source: Path, *patterns: str) -> set[Path]:
    """The files of a folder; other folders in it may have such names, too."""
    return {file for pattern in patterns for file in source.glob(pattern) if file.is_file()}


def _check_arguments(model: str | os.PathLike[str], weights: str) -> None:
    if weights not in WEIGHTS:
        raise BadParameter(f"weights={weights!r} is not possible: choose {', '.join(WEIGHTS)}")
    if is_gguf(model):
        raise BadParameter(
            f"{model} is a GGUF file, whose weights keep their own types: convert it with "
            "leapahead.models.openvino.gguf, or name the folder of a Transformers model"
        )
    if is_openvino(Path(model)):
        raise BadParameter(f"{model} is a folder for OpenVINO already: name the folder of a Transformers model")


def _need(weights: str) -> None:
    """Imports what the export needs, before anything is loaded.

    Raises:
        LeapaheadError: something is not installed; the message names the extra that brings it.
    """
    with needing("the export", "openvino-export", *PACKAGES, "nncf"):
        for package in (*PACKAGES[:2], *(("nncf",) if weights in ("int8", "int4") else ())):
            import_module(package)
    with needing("the export", "transformers", "torch", "transformers", "safetensors"):
        import_module("leapahead.models.transformers.pretrained")


def _write(
    model: str | os.PathLike[str],
    folder: Path,
    weights: str,
    report: Progress,
    trust_remote_code: bool,
    with_tokenizer: bool = True,
) -> tuple[int, str]:
    """Writes all files into `folder`; returns the size of the weights, and why there is no tokenizer."""
    from leapahead.models.openvino import graph as conversion
    from leapahead.models.transformers import pretrained

    def stage(what: str) -> None:
        report(what, STAGES.index(what), len(STAGES))

    stage("loading")
    name = os.fspath(model)
    dtype = DTYPES.get(weights, "auto")
    module, tokenizer, source = pretrained.load_files(name, dtype, trust_remote_code, with_tokenizer)
    if getattr(module.config, "quantization_config", None) is not None:
        raise Refused(f"{name} is quantised already, and only unquantised weights are exported: name such a model")
    stage("converting")
    with pretrained.quiet():
        graph = conversion.convert(module)
    stage("compressing")
    if weights in ("int8", "int4"):
        graph = _compressed(graph, weights)
    graph.set_rt_info(weights, ["leapahead", "weights"])
    stage("writing")
    _save(graph, folder / MODEL)
    for file in _matching(source, *FILES):
        place = folder / file.relative_to(source)
        place.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, place)
    no_tokenizer = _save_tokenizer(tokenizer, folder)
    return (folder / MODEL).with_suffix(".bin").stat().st_size, no_tokenizer


def _compressed(graph: Any, weights: str) -> Any:
    """The graph with weights of 8 or 4 bits."""
    import nncf
    from nncf.quantization.advanced_parameters import AdvancedCompressionParameters, GroupSizeFallbackMode

    options: dict[str, Any] = {"mode": nncf.CompressWeightsMode.INT8_ASYM}
    if weights == "int4":
        adjust = AdvancedCompressionParameters(group_size_fallback_mode=GroupSizeFallbackMode.ADJUST)
        options = {"mode": nncf.CompressWeightsMode.INT4_SYM, "group_size": GROUP, "ratio": 1.0}
        options["advanced_parameters"] = adjust
    with _quiet_nncf():
        return nncf.compress_weights(graph, **options)


@contextmanager
def _quiet_nncf() -> Iterator[None]:
    """Without NNCF's tables and progress bars."""
    log = logging.getLogger("nncf")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            yield
    finally:
        log.setLevel(level)


def _save(graph: Any, file: Path) -> None:
    """Writes a graph with the types that its weights have.

    Raises:
        OSError: it cannot be written. OpenVINO does not tell why.
    """
    import openvino

    constants = (node for node in graph.get_ops() if node.get_type_name() == "Constant")
    sizes = {node.data.ctypes.data: node.get_byte_size() for node in constants}  # tied weights are written once
    try:
        store.check_space(file.parent, sum(sizes.values()))
        openvino.save_model(graph, file, compress_to_fp16=False)
    except RuntimeError as error:
        raise OSError(errno.EIO, first_line(error)) from error


def _save_tokenizer(tokenizer: Any, folder: Path) -> str:
    """Writes the tokenizer as two graphs; returns why it was not, or ""."""
    from openvino_tokenizers import convert_tokenizer

    from leapahead.models.openvino.runtime import core_for_tokenizers

    if tokenizer is None:
        return "the model has none"
    try:
        graphs = convert_tokenizer(tokenizer, with_detokenizer=True)
        split = core_for_tokenizers().compile_model(graphs[0], "CPU")
        for text in TEXTS:
            if split([text])["input_ids"][0].tolist() != list(tokenizer(text).input_ids):
                return "OpenVINO would tokenize differently"
    except (
        Exception
    ) as error:  # of the converter, which raises errors of all kinds for tokenizers that it does not know
        if isinstance(error, (LeapaheadError, OSError)):
            raise
        return f"OpenVINO cannot convert it ({first_line(error)})"
    for graph, name in zip(graphs, ("openvino_tokenizer.xml", "openvino_detokenizer.xml"), strict=True):
        _save(graph, folder / name)
    return ""
