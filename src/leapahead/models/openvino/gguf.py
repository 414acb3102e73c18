"""Converts a GGUF file into a folder for OpenVINO, by the reader of OpenVINO GenAI.

The reader writes its files beside the GGUF file. So it is given a link to it in a folder of its own, and it runs in a
process of its own, whose memory is free afterwards and which may crash: it does so on incomplete files. Weights keep
the types of the file, as far as OpenVINO has them. The scaling of the rotation, which the reader ignores, is added.

The reader's own tokenizer splits some texts in another way than llama.cpp. So the metadata of the file are kept in the
folder, from which llama.cpp makes its tokenizer.

This module loads no model into this process.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from leapahead.core.errors import Refused, needing
from leapahead.models.llama_cpp import file as gguf_file
from leapahead.models.openvino import rotation, store
from leapahead.models.openvino.export import PACKAGES, Exported, Progress
from leapahead.models.openvino.options import METADATA, MODEL, is_openvino

WEIGHTS = "GGUF"  # what a folder has that was made from a GGUF file
READ = (
    "it reads llama, qwen2 and qwen3 with byte-level BPE and weights of the types F16, Q8_0, Q6_K, Q4_K_M, Q4_1, Q4_0"
)
CONVERT = "import sys, openvino_genai; openvino_genai.LLMPipeline(sys.argv[1], 'CPU', enable_save_ov_model=True)"
MORE = 1.25  # most that the converted weights may take, in sizes of the file: some types become larger


def export_gguf(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> Exported:
    """Writes the model in a GGUF file as a folder for OpenVINO.

    Args:
        path: of the GGUF file.
        out: the folder to write; the folder around it must exist.
        force: replace `out` if it is such a folder.
        progress: called with (what, done, total).

    Raises:
        BadParameter: no such file, not a GGUF file or an incomplete one, or `out` cannot be written.
        Refused: OpenVINO GenAI cannot convert it, or would compute another model.
        LeapaheadError: OpenVINO GenAI is not installed.
    """
    path, out = Path(path).expanduser(), Path(out)
    _check(path)
    with store.written(out, force) as folder:
        _convert(path, folder, progress)
    return Exported(out, WEIGHTS, (out / MODEL).with_suffix(".bin").stat().st_size)


def from_gguf(path: str | os.PathLike[str], *, progress: Progress | None = None) -> Path:
    """The model in a GGUF file as a folder for OpenVINO in the cache folder, written there the first time.

    Args:
        path: of the GGUF file.
        progress: called with (what, done, total).

    Raises:
        LeapaheadError: see `export_gguf`.
    """
    path = Path(path).expanduser()
    _check(path)
    return store.kept(path, [path], WEIGHTS, lambda folder: _convert(path, folder, progress))


def _check(path: Path) -> None:
    gguf_file.check_file(path)
    if gguf_file.values(path).get("split.count", 0) > 1:
        raise Refused(
            f"OpenVINO GenAI cannot convert {str(path)!r}, which is a part of a model in several files; join them with "
            "`llama-gguf-split --merge`, or use llama.cpp"
        )
    with needing("the conversion of a GGUF file", "openvino", *PACKAGES):
        import_module("openvino_genai")


def _convert(path: Path, folder: Path, progress: Progress | None) -> None:
    """Writes the files of the model into an empty folder."""
    if progress is not None:
        progress("converting", 0, 1)
    values = gguf_file.values(path)
    store.check_space(folder, int(MORE * path.stat().st_size))
    link = folder / "model.gguf"
    _link(path.resolve(), link)
    done = subprocess.run(  # -P: not with modules of the working directory
        [sys.executable, "-P", "-c", CONVERT, str(link)], capture_output=True, text=True, errors="replace", check=False
    )
    link.unlink()
    if done.returncode or not is_openvino(folder):
        raise Refused(
            f"OpenVINO GenAI cannot convert {str(path)!r}, whose architecture is "
            f"{values.get('general.architecture', 'unknown')} ({_reason(done)}); {READ}: use the file with llama.cpp, "
            "or export the folder of the Transformers model"
        )
    rotation.correct(folder / MODEL, path, values)
    (folder / METADATA).write_bytes(gguf_file.metadata(path))
    (folder / "config.json").write_text(json.dumps(_config(values), indent=2), encoding="utf-8")


def _link(file: Path, link: Path) -> None:
    try:
        link.symlink_to(file)
    except OSError:  # on Windows, without the right to make symbolic links
        try:
            os.link(file, link)
        except OSError:  # on another drive
            store.check_space(link.parent, int((1 + MORE) * file.stat().st_size))
            shutil.copyfile(file, link)


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    """Why the reader failed, as a clause."""
    if done.returncode < 0:
        return f"its reader ended by {signal.Signals(-done.returncode).name}, so the file may be incomplete"
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    reason = next((line for line in lines if "Check 'data != nullptr'" in line), lines[-1] if lines else "no reason")
    return "a type of weights that it does not know" if "data != nullptr" in reason else reason


def _config(values: dict[str, Any]) -> dict[str, Any]:
    """What the header tells about the model, under the names of Transformers' configurations."""
    family = values.get("general.architecture")
    ends = (values.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    found = {
        "model_type": family,
        "max_position_embeddings": values.get(f"{family}.context_length"),
        "num_hidden_layers": values.get(f"{family}.block_count"),
        "hidden_size": values.get(f"{family}.embedding_length"),
        "sliding_window": values.get(f"{family}.attention.sliding_window"),
        "bos_token_id": values.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(dict.fromkeys(token for token in ends if token is not None)) or None,
    }
    return {name: value for name, value in found.items() if value is not None}
