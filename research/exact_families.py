"""`python -m research exact-families`: `check --exact` on small random models with windows and experts, by engine.

    a case     a family, in a type of weights, on an engine, greedy or sampled        refused by name, or compared
    compared   every drafter that the target serves, in batches of 4, with plain decoding
    control    the same model and drafters without exact mode: where nothing differs, equality shows nothing

The models are those of the tests (`tests/architectures.py`, `tests/gguf_architectures.py`), whose windows are shorter
than the texts. Their weights are large enough that texts are varied, which the share of distinct 4-grams tells. A draft
model that is the model itself drafts tokens that are accepted; the other drafters' are mostly rejected.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import numpy as np

from leapahead.bench.conditions import conditions
from leapahead.check import Report, check
from leapahead.cli.command import Command
from leapahead.core.errors import Refused
from leapahead.core.parameters import one_of
from leapahead.core.sampling import SamplingParams
from leapahead.models import loading
from leapahead.models.base import Target
from leapahead.models.transformers.pretrained import quiet

OUT = Path("docs/bench/exact-families.json")
BATCH, CONTEXT, THREADS = 4, 256, 1
LENGTHS = (5, 23, 60, 111)  # tokens of prompts
TEMPERATURES = (0.0, 0.3)  # low, so that rounding shows beside the noise
# Larger than in the tests, so that sums have many terms and round in many ways; and where a small random model has one
# matrix for input and output, its text is one token.
WIDE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 320, "head_dim": 32, "vocab_size": 512}
WIDE["tie_word_embeddings"] = False
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 64}
GGUF_TYPES = {"bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0", "q4_0": "MOSTLY_Q4_0"}

Open = Callable[[bool], Target]  # whether in exact mode


@dataclass(frozen=True)
class Case:
    """A model on an engine.

    Attributes:
        prepare: writes files into a folder, and returns what loads them.
        temperature: 0 is greedy.
    """

    engine: str
    weights: str
    family: str
    prepare: Callable[[Path], Open]
    temperature: float = 0.0

    @property
    def key(self) -> tuple[str, str, str, float]:
        return self.engine, self.weights, self.family, self.temperature


def cases() -> list[Case]:
    """All cases; the folder of the tests must be importable."""
    found = [
        Case("Transformers", "bf16", name, partial(_transformers, name))
        for name in ("mistral", "gemma2", "gemma3", "mixtral", "qwen3_moe", "gpt_oss")
    ]
    found += [
        Case("llama.cpp", kind, name, partial(_gguf, name, kind))
        for name in ("gemma2", "mixtral", "gemma3", "gpt_oss")
        for kind in GGUF_TYPES
    ]
    found += [
        Case("OpenVINO", "bf16", name, partial(_openvino, name))
        for name in ("mistral", "gemma2", "gemma3", "mixtral", "qwen3_moe", "gpt_oss")
    ]
    return [replace(case, temperature=temperature) for case in found for temperature in TEMPERATURES]


def _model(name: str) -> Any:
    """A model of Transformers in bfloat16, of the tests' family but wider."""
    import torch

    each = import_module("architectures").BY_NAME[name]
    experts = EXPERTS if "moe_intermediate_size" in each.options else {}
    return replace(each, options={**each.options, **WIDE, **experts}).build(torch.bfloat16)


def _transformers(name: str, folder: Path) -> Open:
    return lambda exact: loading.load(_model(name), exact=exact).target


def _openvino(name: str, folder: Path) -> Open:
    from leapahead.models.openvino import export
    from leapahead.models.openvino import folder as openvino
    from leapahead.models.openvino.options import OpenVinoOptions

    _model(name).save_pretrained(folder / "model")
    path = export.export(folder / "model", folder / name, "bf16").path
    return lambda exact: openvino.load(path, OpenVinoOptions(n_threads=THREADS, precision="bf16"), exact=exact)


def _gguf(name: str, kind: str, folder: Path) -> Open:
    import llama_cpp

    from leapahead.models.llama_cpp import log

    log.install()
    plain, file = import_module("gguf_architectures").BY_NAME[name].path(), folder / f"{name}-{kind}.gguf"
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_{GGUF_TYPES[kind]}")
    assert llama_cpp.llama_model_quantize(bytes(plain), bytes(file), options) == 0

    def load(exact: bool) -> Target:
        several: dict[str, Any] = {"n_seq_max": BATCH} if exact else {}
        return loading.load(file, exact=exact, n_ctx=CONTEXT, n_threads=THREADS, **several).target

    return load


def measured(case: Case, texts: int, new: int) -> dict[str, Any]:
    """The row of a case.

    Args:
        texts: number of prompts; the control takes a quarter of them.
        new: tokens of each text.
    """
    row: dict[str, Any] = dict(zip(("engine", "weights", "family", "temperature"), case.key, strict=True))
    with tempfile.TemporaryDirectory() as place:
        try:
            load = case.prepare(Path(place))
            target = load(True)
        except Refused as error:
            reason = str(error).partition("in exact mode")[2].partition("; ")[0]
            return {**row, "refused": reason.strip("(): ") or str(error)}
        row |= _compared(target, load, texts, new, case.temperature)
        row["control"] = _compared(load(False), load, max(texts // 4, 1), new, case.temperature)
        return {**row, "conditions": conditions(target)}


def _compared(target: Target, load: Open, texts: int, new: int, temperature: float) -> dict[str, Any]:
    """All drafters' texts against plain decoding's."""
    rng = np.random.default_rng(7)
    prompts = [
        rng.integers(3, target.info.vocab_size, LENGTHS[index % len(LENGTHS)]).tolist() for index in range(texts)
    ]
    settings: dict[str, Any] = {
        "max_new_tokens": new,
        "sampling": SamplingParams(temperature=temperature),
        "batch": BATCH,
    }
    report = check(target, None, prompts, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this draft model takes as long as the model
        itself = {"draft": load(False), "nodes": 4, "depth": 4, "chain": True}
        twin = check(target, None, prompts, ["draft_model"], options=itself, **settings)
    return _figures([report, twin])


def _figures(reports: Sequence[Report]) -> dict[str, Any]:
    rows = [row for report in reports for row in report.drafters if row.refused is None]
    return {
        "drafters": [row.name for row in rows],
        "tokens": sum(row.tokens for row in rows),
        "differing": sum(len(row.differences) for row in rows),
        "distinct_4": round(reports[0].distinct_4_grams, 3),
        "acceptance_length": round(rows[-1].stats.acceptance_length, 3),  # of the draft model
    }


@click.command(cls=Command)
@click.argument("tests", default="tests", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--texts", type=click.IntRange(min=1), default=16, show_default=True, help="Prompts of a case.")
@click.option(
    "--max-new-tokens", "new", type=click.IntRange(min=1), default=80, show_default=True, help="Tokens of a text."
)
@click.option("--engine", "engines", multiple=True, metavar="NAME", help="Only this engine; may be repeated.")
@click.option("--resume", is_flag=True, help="Leave out the cases that the file has already.")
@click.option(
    "--out",
    default=OUT,
    show_default=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="The file that is written, after every case.",
)
def main(tests: Path, texts: int, new: int, engines: tuple[str, ...], resume: bool, out: Path) -> None:
    """Compare all drafters with plain decoding in exact mode, on models with windows and experts of every engine.

    TESTS is the folder of the tests, which have the models.
    """
    sys.path.insert(0, str(tests))
    old = json.loads(out.read_text(encoding="utf-8"))["rows"] if out.is_file() else []
    rows = {(row["engine"], row["weights"], row["family"], row["temperature"]): row for row in old}
    order = cases()
    for engine in engines:
        one_of("engine", engine, dict.fromkeys(case.engine for case in order))
    for case in order:
        if (engines and case.engine not in engines) or (resume and case.key in rows):
            continue
        with quiet():
            row = measured(case, texts, new)
        rows[case.key] = {**row, "texts": texts, "new": new}
        lines = ",\n".join(json.dumps(rows[each.key]) for each in order if each.key in rows)
        out.write_text(f'{{"rows": [\n{lines}\n]}}\n', encoding="utf-8")
        found = row.get("refused") or (
            f"{row['differing']} of {row['tokens']} tokens differ; without exact mode "
            f"{row['control']['differing']} of {row['control']['tokens']}"
        )
        click.echo(f"{' '.join(map(str, case.key))}: {found}")
