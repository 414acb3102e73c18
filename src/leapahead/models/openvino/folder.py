"""Loads an OpenVINO folder: the model, what its config.json says of it, and its tokenizer.

    openvino_model.xml, .bin          the model           by its states where it cannot be given paged attention
    config.json                       context length, sliding windows, end tokens
    generation_config.json            end tokens
    tokenizer.json, ...               the tokenizer, where Transformers is installed
    openvino_(de)tokenizer.xml        the tokenizer, where it is not
    metadata.gguf                     the tokenizer of a GGUF file, where llama-cpp-python is installed

This module knows nothing of how a model is run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from leapahead.core.errors import BadParameter, Refused, needing
from leapahead.core.text import Tokenizer
from leapahead.core.tree import UNLIMITED
from leapahead.models import huge_pages
from leapahead.models.llama_cpp import file as gguf_file
from leapahead.models.memory import free_host_bytes
from leapahead.models.openvino import export, gguf
from leapahead.models.openvino.compiled import CompiledModel
from leapahead.models.openvino.model import OpenVinoTarget
from leapahead.models.openvino.options import METADATA, MODEL, OpenVinoOptions, is_openvino
from leapahead.models.openvino.paged import PagedModel
from leapahead.models.openvino.stateful import StatefulModel
from leapahead.models.openvino.tokenizer import OpenVinoTokenizer

LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "max_sequence_length")
USUAL_LENGTH = 4096  # of a model whose folder does not tell it, not even in the graph
# Models and pre-tokenizers of GGUF files with which OpenVINO's tokenizer splits texts as llama.cpp does.
SAME_SPLITS = (("gpt2", "qwen2"), ("gpt2", "smollm"))
ATTENTION = ("full_attention", "sliding_attention")  # kinds of layers that paged attention computes
CACHE_SHARE = 0.5  # of the free memory


@dataclass(frozen=True)
class Description:
    """What a folder says of its model.

    Attributes:
        context_length: greatest number of tokens of a sequence; `UNLIMITED` where config.json does not tell.
        windows: of each layer the number of tokens that it attends to, 0 for all; None where no layer has a window.
        paged: whether paged attention computes all kinds of layers.
        end_token_ids: of the configurations.
    """

    context_length: int
    windows: tuple[int, ...] | None
    paged: bool
    end_token_ids: tuple[int, ...]


def converted(model: str | Path, weights: str | None, trust_remote_code: bool, with_tokenizer: bool = True) -> Path:
    """The folder of a model; one of Transformers, or a GGUF file, is converted once and kept in the cache directory.

    Args:
        weights: the type that a folder of Transformers is exported with; bf16 by default.
        with_tokenizer: see `export.cached_export`.

    Raises:
        LeapaheadError: it cannot be converted, or it is exported already and `weights` is given.
    """
    if is_openvino(model):
        if weights is not None:
            raise BadParameter(
                f"weights={weights!r} is not possible for {str(model)!r}, which is exported already; export its "
                "original again with `leapahead export-openvino`"
            )
        return Path(model).expanduser()
    if gguf_file.is_gguf(model):
        if weights is not None:
            raise BadParameter(f"weights={weights!r} is not possible for a GGUF file, whose weights keep their types")
        return gguf.from_gguf(model)
    return export.cached_export(
        model, weights or export.USUAL, trust_remote_code=trust_remote_code, with_tokenizer=with_tokenizer
    )


def tokenizer(folder: Path, of_transformers: Callable[[str], Tokenizer]) -> Tokenizer | None:
    """The tokenizer of a folder; None where it has none.

    That of Transformers; or, without Transformers, OpenVINO's, which was compared with it when the folder was written.
    That of a GGUF file is llama.cpp's; or, without llama.cpp, OpenVINO's, where it splits all texts in the same way.

    Args:
        of_transformers: loads Transformers' own files.

    Raises:
        LeapaheadError: it cannot be loaded, or llama-cpp-python is not installed and OpenVINO's is another one.
    """
    if (folder / METADATA).is_file():
        return _of_gguf(folder)
    has_graph = (folder / "openvino_tokenizer.xml").is_file()
    if (folder / "tokenizer_config.json").is_file() and (find_spec("transformers") is not None or not has_graph):
        return of_transformers(str(folder))
    return OpenVinoTokenizer(folder) if has_graph else None


def _of_gguf(folder: Path) -> Tokenizer:
    """The tokenizer of a folder that was made from a GGUF file."""
    values = gguf_file.values(folder / METADATA)
    splits = tuple(values.get(f"tokenizer.ggml.{name}", "none") for name in ("model", "pre"))
    adds = any(values.get(f"tokenizer.ggml.add_{name}_token") for name in ("bos", "eos"))  # OpenVINO's adds neither
    if splits in SAME_SPLITS and not adds and find_spec("llama_cpp") is None:
        return OpenVinoTokenizer(folder)
    what = f"the tokenizer of this GGUF file ({' '.join(splits)}), from which OpenVINO's differs,"
    with needing(what, "llama-cpp", "llama_cpp"):
        from leapahead.models.llama_cpp.tokenizer import read_tokenizer
    return read_tokenizer(folder / METADATA)


@huge_pages.for_new_memory()
def load(
    folder: str | Path, options: OpenVinoOptions | None = None, name: str | None = None, exact: bool = False
) -> OpenVinoTarget:
    """Loads a folder.

    Args:
        folder: with openvino_model.xml.
        options: how the model is compiled.
        name: for reports and messages; by default the folder's name.
        exact: see `OpenVinoTarget`.

    Raises:
        LeapaheadError: whatever is wrong with the folder or the options, in one sentence.
    """
    options, path = options or OpenVinoOptions(), Path(folder).expanduser()
    described = describe(path)
    model = _model(path / MODEL, options, described)
    length = described.context_length
    fitting = int(CACHE_SHARE * free_host_bytes()) // model.bytes_per_token
    return OpenVinoTarget(
        model,
        context_length=length if length < UNLIMITED else model.context_length or USUAL_LENGTH,
        cache_tokens=options.cache_tokens or fitting,
        name=name or path.resolve().name,
        exact=exact,
        # A window of unknown size is taken for the smallest one.
        window=min((each for each in described.windows or () if each), default=int(model.windowed)),
    )


def _model(file: Path, options: OpenVinoOptions, described: Description) -> CompiledModel:
    """The compiled model: with paged attention, or with its own states where that is not possible."""
    if described.paged:
        try:
            return PagedModel(file, options, described.windows)
        except Refused:
            pass
    return StatefulModel(file, options)


def describe(folder: Path) -> Description:
    """Reads the configurations of a folder.

    Raises:
        BadParameter: config.json is missing, one of them cannot be read, or the context is not possible.
    """
    if not (folder / "config.json").is_file():
        raise BadParameter(
            f"{str(folder)!r} has no config.json, which tells context, windows and end tokens; export the model again, "
            "or copy it from the model's original folder"
        )
    config, generation = _json(folder / "config.json"), _json(folder / "generation_config.json")
    text = config.get("text_config") or config
    length = _length(text)
    if length < 1:
        raise BadParameter(
            f"a context of {length} tokens in {str(folder / 'config.json')!r} is not possible; correct it"
        )
    ends: dict[int, None] = {}
    for claim in (generation.get("eos_token_id"), config.get("eos_token_id"), text.get("eos_token_id")):
        for token in claim if isinstance(claim, Iterable) else [claim]:
            if isinstance(token, int):
                ends[token] = None
    kinds = _kinds(text)
    return Description(length, _windows(text, kinds, length), set(kinds) <= set(ATTENTION), tuple(ends))


def _length(text: dict[str, Any]) -> int:
    """The greatest number of tokens of a sequence."""
    length = next((int(text[name]) for name in LENGTHS if isinstance(text.get(name), int)), UNLIMITED)
    given = text.get("rope_parameters")
    # Those of Transformers before 5 say `rope_scaling`, and it computed some graphs without the factor of YaRN.
    if isinstance(given, dict) and given.get("rope_type") == "yarn":
        length = max(length, int((given.get("factor") or 1) * given.get("original_max_position_embeddings", 0)))
    rope = given or text.get("rope_scaling") or {}
    for parameters in (rope, *rope.values()) if isinstance(rope, dict) else ():  # of all layers, or by their kinds
        if isinstance(parameters, dict) and parameters.get("rope_type", parameters.get("type")) == "longrope":
            # Beyond this length the rotation of every position changes, cached tokens included.
            original = "original_max_position_embeddings"
            length = min(length, int(parameters.get(original) or text.get(original) or length))
    return length


def _kinds(text: dict[str, Any]) -> Sequence[str]:
    """The kinds of the layers, one each; none where all attend to everything."""
    window, layers, kinds = text.get("sliding_window"), text.get("num_hidden_layers"), text.get("layer_types")
    if kinds is None and window and text.get("use_sliding_window", True) and isinstance(layers, int):
        # Configurations that are older than `layer_types`: Qwen's first layers and every n-th one attend to everything.
        first, every = text.get("max_window_layers") or 0, text.get("sliding_window_pattern") or layers + 1
        every = len(every) if isinstance(every, str) else every  # LLLG is the same as 4
        return [ATTENTION[at >= first and (at + 1) % every != 0] for at in range(layers)]
    return kinds or ()


def _windows(text: dict[str, Any], kinds: Sequence[str], length: int) -> tuple[int, ...] | None:
    """The windows of the layers; None where none is shorter than the context."""
    window = text.get("sliding_window")
    if not isinstance(window, int) or window >= length or "sliding_attention" not in kinds:
        return None
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def _json(file: Path) -> dict[str, Any]:
    """The content of a configuration; empty where there is none."""
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BadParameter(f"{str(file)!r} cannot be read: {error}; export the model again") from None
    if not isinstance(found, dict):
        raise BadParameter(f"{str(file)!r} is not a configuration; export the model again")
    return found
