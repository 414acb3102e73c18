"""The rotation of a graph that OpenVINO GenAI made from a GGUF file: the same as llama.cpp's, or the file is refused.

The reader takes its base from the file and ignores its scaling. The graph has the frequencies as one constant, which is
found by its values, base ** (-2i / width), and replaced where the file scales them:

    rope.scaling.factor, linear    divides every frequency
    rope_freqs.weight              divides each by a number of its own, as Llama 3.1 does

It is also replaced where it is in float16, as of F16 files, by which angles of later positions would be wrong.

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
# Types of the constant in the graph, with the relative and the absolute tolerance of its values.
TYPES = {"f32": ("<f4", 1e-5, 0.0), "f16": ("<f2", 1e-3, 2.0**-24)}
ALIGNMENT = 64  # of constants in the .bin file


def correct(graph: Path, path: Path, values: dict[str, Any]) -> None:
    """Writes the frequencies of a GGUF file into the converted graph.

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
    tree = ElementTree.parse(graph)
    constants = _constants(tree, graph.with_suffix(".bin"), plain)
    factors = gguf_file.tensor(path, FREQUENCIES)
    if len(constants) != 1 or (factors is not None and len(factors) < 4 * len(plain)):
        raise Refused(
            f"OpenVINO GenAI computes another model than {str(path)!r}: it does not rotate {width} numbers of each "
            f"head with the base {base:g}; {REMEDY}"
        )
    if factors is not None:
        divisor = divisor * np.frombuffer(factors, "<f4", len(plain)).astype(np.float64)
    if np.any(divisor != 1) or constants[0].find("data[@element_type='f32']") is None:
        _replace(tree, constants[0], graph, (plain / divisor).astype("<f4").tobytes())


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


def _constants(
    tree: ElementTree.ElementTree[ElementTree.Element], weights: Path, expected: npt.NDArray[np.float64]
) -> list[ElementTree.Element]:
    """The constants of the graph that have these values."""
    found = []
    with weights.open("rb") as opened:
        for constant in tree.iterfind("layers/layer[@type='Const']"):
            if (data := constant.find("data")) is None or data.get("element_type") not in TYPES:
                continue
            kind, relative, absolute = TYPES[data.get("element_type", "")]
            size = np.dtype(kind).itemsize * len(expected)
            if data.get("size") == str(size):
                opened.seek(int(data.get("offset", 0)))
                if np.allclose(np.frombuffer(opened.read(size), kind), expected, relative, absolute):
                    found.append(constant)
    return found


def _replace(
    tree: ElementTree.ElementTree[ElementTree.Element], constant: ElementTree.Element, graph: Path, values: bytes
) -> None:
    """Appends float32 values to the weights, and makes the constant refer to them."""
    with graph.with_suffix(".bin").open("ab") as opened:
        opened.write(bytes(-opened.tell() % ALIGNMENT))
        place = {"element_type": "f32", "offset": str(opened.tell()), "size": str(len(values))}
        opened.write(values)
    for data in constant.iterfind("data"):
        data.attrib.update(place)
    for port in constant.iterfind("output/port"):
        port.set("precision", "FP32")
    tree.write(graph, encoding="utf-8", xml_declaration=True)
