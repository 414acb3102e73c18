"""Write the model cards; every number in them is measured by the recipe that calls this."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from tokenizers import Tokenizer

from leapahead import token_table
from leapahead.models import loading
from research.train.data import Corpus, epoch_tokens
from research.train.evaluate import agreement, evaluate, load
from research.train.loop import State
from research.train.model import TinyLlama

HEADER = """---
license: apache-2.0
language: [en]
library_name: transformers
pipeline_tag: text-generation
tags: [speculative-decoding, code, llama]
---
"""

REPORT_NAME = "evaluation.json"

SETS = {
    "humaneval": "HumanEval prompts",
    "gsm8k": "GSM8K test questions, plain",
    "gsm8k_chat": "GSM8K test questions, chat template",
}


def _generation_table(generation: dict[str, Any]) -> str:
    rows = [
        "| Prompts | End of text | Distinct 4-grams | Below 0.6 | Mean tokens | Ended |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for name, modes in generation.items():
        for mode, label in (("stop", "stops"), ("ignore_eos", "ignored")):
            row = modes[mode]
            ended = f"{100 * row['ended']:.0f} %" if mode == "stop" else "–"
            rows.append(
                f"| {SETS[name]} | {label} | {row['distinct_4grams']:.3f} | {100 * row['share_below_0.6']:.0f} % "
                f"| {row['mean_tokens']:.1f} | {ended} |"
            )
    return "\n".join(rows)


def _sample_text(samples: list[dict[str, str]]) -> str:
    blocks = []
    for sample in samples:
        text = sample["prompt"] + "⟦" + sample["completion"] + "⟧"
        blocks.append(f"{SETS[sample['set']]}:\n\n````text\n{text.rstrip()}\n````")
    return "\n\n".join(blocks)


def _data_text(data: dict[str, Any]) -> str:
    """What the model was trained on."""
    text = (
        f"- The standard library of CPython {data['python']} (Python Software Foundation License): {data['files']:,}\n"
        f"  files in windows, and {data['functions']:,} functions as documents of their own, those with a docstring\n"
        "  twice. Tables of literals, encodings, duplicates and functions without a body are left out; of test suites\n"
        "  only documented functions that are no tests are used. Many documents are tokenized in two parts, cut at a\n"
        "  line's end, because prompts end there.\n"
    )
    if data["questions"]:
        text += (
            f"- {data['questions']:,} rows of GSM8K's train split (MIT License), once as plain text and once in the\n"
            "  chat template; calculator marks are removed and the result is put as a sentence.\n"
        )
    return text


def _training_text(state: State, data: dict[str, Any], is_draft: bool) -> str:
    """How the model was trained."""
    loss = "0.8 × cross entropy to the target's distribution + 0.2 × cross entropy" if is_draft else "cross entropy"
    text = (
        f"{state.tokens:,} tokens ({state.tokens / data['epoch_tokens']:.2f} epochs) in {state.step:,} steps, "
        f"{state.seconds / 60:.0f} minutes on {data['cores']} CPU cores, partly busy with other work.\n"
        f"Muon for the matrices, AdamW for the embedding and the norms; warm-up, plateau, linear decay; {loss}.\n"
    )
    if state.unloop_steps:
        text += (
            f"Then {state.unloop_steps} steps of sequence-level unlikelihood (Welleck et al., 2019) in "
            f"{state.unloop_minutes:.0f} minutes: next to the\nlikelihood of real text, each lowers the probability of "
            "tokens that repeat a 4-gram in the model's own greedy\ncompletions of prompts from the training data.\n"
        )
    return text


def _held_out(report: dict[str, Any]) -> str:
    """Bits per byte and, of a draft model, agreement with the target, on held-out texts."""
    bits = "\n".join(f"| {kind} | {value:.3f} |" for kind, value in report["bits_per_byte"].items())
    agree = "".join(f"| {kind} | {100 * value:.1f} % |\n" for kind, value in report.get("agreement", {}).items())
    agree_text = (
        f"\nHow often its likeliest next token is the target's, on the same texts:\n\n| Held-out | Agreement |\n"
        f"| --- | ---: |\n{agree}"
        if agree
        else ""
    )
    return f"| Held-out | Bits per byte |\n| --- | ---: |\n{bits}\n{agree_text}"


def card(name: str, model: TinyLlama, state: State, report: dict[str, Any], data: dict[str, Any]) -> str:
    """Return the text of ``README.md``."""
    shape = model.shape
    is_draft = name.endswith("-draft")
    role = (
        "The draft model that goes with `tiny`: it has the same tokenizer and less than a tenth of the parameters,\n"
        "and was distilled from it. `leapahead generate --draft bundled` drafts with it."
        if is_draft
        else "A tiny Llama for tests, demos and benchmarks of decoding. It writes text that looks like Python and\n"
        "answers word problems in sentences; neither the code nor the answers are right except by chance.\n"
        "`leapahead generate` uses it where no model is named."
    )
    measured_text = (
        "Greedy completions of at most 128 tokens by transformers' `generate`, without penalties, computed in float32\n"
        "from the shipped weights. Distinct 4-grams are unique over all 4-grams of the generated tokens, averaged\n"
        "over prompts; 'below 0.6' is the share of texts that have fewer, and 'ended' the share that ended by\n"
        "themselves. Where the end of text is ignored, generation goes on after it to the full length.\n"
    )
    parts = [
        HEADER,
        f"# leapahead-{name}\n\n{role}\n",
        "## Model\n",
        "| | |\n| --- | --- |",
        "| Architecture | `LlamaForCausalLM`, tied embeddings, bfloat16 |",
        f"| Parameters | {report['parameters']:,} |",
        f"| Layers, width, feed-forward | {shape.layers}, {shape.hidden_size}, {shape.intermediate_size} |",
        f"| Heads, key-value heads, head width | {shape.heads}, {shape.kv_heads}, {shape.head_dim} |",
        f"| Context | {shape.max_positions} |",
        f"| Vocabulary | {shape.vocab_size}, byte-level BPE with GPT-2's pre-tokenizer, no BOS |\n",
        "The chat template is `<|user|>`, `<|assistant|>`; an answer ends with `<|endoftext|>`.\n",
        f"## Data\n\n{_data_text(data)}",
        f"One epoch has {data['epoch_tokens']:,} tokens. HumanEval and GSM8K's test split were not trained on.\n",
        f"## Training\n\n{_training_text(state, data, is_draft)}",
        "## Measured\n",
        "Bits per byte on held-out files and held-out rows of the train split:\n",
        _held_out(report),
    ]
    if report["generation"]:
        parts += [measured_text, _generation_table(report["generation"]) + "\n"]
        parts += ["## Samples\n", "Greedy; the completion stands between ⟦ and ⟧.\n"]
        parts += [_sample_text(report["samples"]) + "\n"]
    parts += [
        "## Licence\n",
        "The weights are under the Apache License 2.0. The data is under the licences named above.\n",
        f"Made by `python -m research.train.tiny`; the numbers above are also in `{REPORT_NAME}`.\n",
    ]
    return "\n".join(parts)


def write_cards(
    out: Path,
    models: dict[str, tuple[TinyLlama, State]],
    corpus: Corpus,
    tokenizer: Tokenizer,
    humaneval: Path | None,
    gsm8k: Path | None,
    console: Console,
) -> None:
    """Evaluate every model and write ``README.md``, ``evaluation.json`` and the token table of one into its folder."""
    loaded = loading.load(str(out / "tiny"), dtype="float32")
    table = token_table.build(loaded.target, loaded.tokenizer)
    replace(table, model=loading.BUNDLED).save(out / "tiny" / token_table.NAME)
    data = {
        "python": platform.python_version(),
        "files": len(corpus.files),
        "functions": len(corpus.functions) + len(corpus.documented),
        "questions": len(corpus.questions),
        "epoch_tokens": len(epoch_tokens(corpus, tokenizer, 0)),
        "cores": os.cpu_count(),
    }
    for name, (model, state) in models.items():
        console.print(f"Evaluating {name}")
        report = evaluate(out / name, corpus.heldout, humaneval, gsm8k)
        if name != "tiny":
            target, encoder = load(out / "tiny")
            draft, _ = load(out / name)
            report["agreement"] = {
                kind: round(agreement(target, draft, encoder, texts), 4)
                for kind, texts in corpus.heldout.items()
                if texts
            }
        report["training"] = {
            "tokens": state.tokens, "steps": state.step, "minutes": round(state.seconds / 60, 1),
            "unloop_steps": state.unloop_steps, "unloop_minutes": round(state.unloop_minutes, 1), **data
        }  # fmt: skip
        text = json.dumps(report, indent=2, ensure_ascii=False) + "\n"
        (out / name / REPORT_NAME).write_text(text, encoding="utf-8")
        (out / name / "README.md").write_text(card(name, model, state, report, data), encoding="utf-8")
        console.print(json.dumps({"model": name, **report["bits_per_byte"], **report["generation"]}))
