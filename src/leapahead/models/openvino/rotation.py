"""The rotation of a graph that OpenVINO GenAI made from a GGUF file: the same as llama.cpp's, or the file is refused.

The reader takes its base from the file and ignores its scaling. The graph has the frequencies as one constant, which is
found by its values, base ** (-2i / width), and overwritten where the file scales them:

    rope.scaling.factor, linear    divides every frequency
    rope_freqs.weight              divides each by a number of its own, as Llama 3.1 does

This module does not import OpenVINO.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import numpy.typing as npt

from leapahead.core.errors import Refused
from leapahead.models.llama_cpp import file as gguf_file

FREQUENCIES = "rope_freqs.weight"
REMEDY = "use the file with llama.cpp, or export the folder of the Transformers model with `leapahead export-openvino`"
TOLERANCE = 1e-5  # relative, of float32 powers


def correct(graph: Path, path: Path, values: dict[str, Any]) -> None:
    """Writes the scaled frequencies of a GGUF file into the converted graph.

    Args:
        graph: the .xml file, beside its .bin.
        path: of the GGUF file.
        values: of its header.

    Raises:
        Refused: the rotation is of another kind, or its frequencies are not found in the graph.
    """
    family = values.get("general.architecture")
    divisor = _factor(path, values, f"{family}.rope")
    heads = values.get(f"{family}.attention.head_count") or 1
    head = values.get(f"{family}.attention.key_length") or values.get(f"{family}.embedding_length", 0) // heads
    width = values.get(f"{family}.rope.dimension_count") or head
    base = values.get(f"{family}.rope.freq_base", 10000.0)
    plain = base ** (-np.arange(0, width, 2) / max(width, 1))
    weights = graph.with_suffix(".bin")
    places = _places(graph, weights, plain)
    factors = gguf_file.tensor(path, FREQUENCIES)
    if len(places) != 1 or (factors is not None and len(factors) < 4 * len(plain)):
        raise Refused(
            f"OpenVINO GenAI computes another model than {str(path)!r}: it does not rotate {width} numbers of each "
            f"head with the base {base:g}; {REMEDY}"
        )
    if factors is not None:
        divisor = divisor * np.frombuffer(factors, "<f4", len(plain)).astype(np.float64)
    if np.any(divisor != 1):
        with weights.open("r+b") as opened:
            opened.seek(places[0])
            opened.write((plain / divisor).astype("<f4").tobytes())


def _factor(path: Path, values: dict[str, Any], rope: str) -> Any:
    """What divides every frequency.

    Raises:
        Refused: the rotation is scaled in another way.
    """
    kind, attention = values.get(f"{rope}.scaling.type", "linear"), values.get(f"{rope}.scaling.attn_factor", 1.0)
    if kind not in ("none", "linear") or attention != 1:
        what = f"scaling.type {kind!r}" if attention == 1 else f"scaling.attn_factor {attention:g}"
        raise Refused(f"OpenVINO GenAI does not scale the rotation of {str(path)!r} ({rope}.{what}); {REMEDY}")
    factor = values.get(f"{rope}.scaling.factor") or values.get(f"{rope}.scale_linear")
    return np.float64(1.0 if kind == "none" else factor or 1.0)


def _places(graph: Path, weights: Path, expected: npt.NDArray[np.float64]) -> list[int]:
    """Where the weights have these numbers, as a constant of the graph."""
    found = []
    with weights.open("rb") as opened:
        for data in ElementTree.parse(graph).getroot().iterfind("layers/layer[@type='Const']/data"):
            if (data.get("element_type"), data.get("size")) == ("f32", str(4 * len(expected))):
                opened.seek(place := int(data.get("offset", 0)))
                if np.allclose(np.frombuffer(opened.read(4 * len(expected)), "<f4"), expected, TOLERANCE, atol=0):
                    found.append(place)
    return found
