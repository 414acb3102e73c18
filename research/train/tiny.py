"""Train the bundled target and draft: ``python -m research.train.tiny --out DIR``."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click
import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from research.train.data import Corpus, epoch_tokens, read_corpus, stdlib_folder, tokenizer_texts
from research.train.loop import Plan, State, train
from research.train.model import Shape, TinyLlama, check_export
from research.train.tokenizer import END, save_tokenizer, train_tokenizer, write_json

VOCAB_SIZE = 4096
TARGET = Shape(VOCAB_SIZE, hidden_size=256, layers=6, heads=4, kv_heads=2, intermediate_size=768)
DRAFT = Shape(VOCAB_SIZE, hidden_size=96, layers=2, heads=3, kv_heads=1, intermediate_size=192)


def export(model: TinyLlama, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a model folder in the hub's layout, with bfloat16 weights, and check it against transformers."""
    folder.mkdir(parents=True, exist_ok=True)
    end = tokenizer.token_to_id(END)
    assert end is not None
    weights = {name: value.detach().bfloat16().contiguous() for name, value in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors writes files that only their owner can read
    write_json(folder / "config.json", model.shape.llama_config(end))
    write_json(
        folder / "generation_config.json",
        {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end, "do_sample": False},
    )
    save_tokenizer(tokenizer, folder, model.shape.max_positions)
    check_export(model, folder)


def load_tokenizer(corpus: Corpus, work: Path, resume: bool) -> Tokenizer:
    """Train the tokenizer, or take the one of the run that is resumed."""
    path = work / "tokenizer.json"
    if resume and path.exists():
        return Tokenizer.from_file(str(path))
    tokenizer = train_tokenizer(tokenizer_texts(corpus), VOCAB_SIZE)
    work.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))
    return tokenizer


def unlooped(
    target: TinyLlama,
    state: State,
    corpus: Corpus,
    tokenizer: Tokenizer,
    work: Path,
    minutes: float,
    steps: int | None,
    seed: int,
    resume: bool,
    console: Console,
) -> None:
    """Run the stage against loops on ``target`` in place, or load its outcome where the run is resumed."""
    from research.train.unloop import Prompts, unloop

    path = work / "tiny-unlooped.safetensors"
    if resume and path.exists():
        target.load_state_dict(load_file(path))
        state.unloop_steps, state.unloop_minutes = json.loads(path.with_suffix(".json").read_text())
        return
    row = epoch_tokens(corpus, tokenizer, seed + 500)
    state.unloop_steps, state.unloop_minutes = unloop(
        target, Prompts(corpus, tokenizer), row, minutes=minutes, steps=steps, seed=seed, console=console
    )
    save_file(target.state_dict(), path)
    path.with_suffix(".json").write_text(json.dumps([state.unloop_steps, state.unloop_minutes]))


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Gets tiny/, tiny-draft/ and work/.")
@click.option("--stdlib", type=click.Path(exists=True, path_type=Path), help="Default: this Python's library.")
@click.option("--gsm8k", type=click.Path(exists=True, path_type=Path), help="GSM8K's train split as JSON lines.")
@click.option("--minutes", type=float, help="Time for the target; default 76 unless --steps is given.")
@click.option("--steps", type=int, help="Optimizer steps for the target instead of --minutes; repeatable.")
@click.option("--unloop-minutes", type=float, default=17.0, show_default=True, help="Time against loops; 0 for none.")
@click.option("--unloop-steps", type=int, help="Steps against loops instead.")
@click.option("--draft-minutes", type=float, default=8.0, show_default=True, help="Time for the draft.")
@click.option("--draft-steps", type=int, help="Optimizer steps for the draft instead.")
@click.option("--draft/--no-draft", default=True, show_default=True, help="Whether to train the draft, too.")
@click.option("--decay", type=float, default=0.5, show_default=True, help="Share of the time the rate decays.")
@click.option("--humaneval", type=click.Path(exists=True, path_type=Path), help="Prompts, for evaluation only.")
@click.option("--gsm8k-test", type=click.Path(exists=True, path_type=Path), help="Questions, for evaluation only.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--threads", type=int, help="Default: all cores.")
@click.option("--compile/--no-compile", "compile_", default=True, show_default=True)
@click.option("--resume", is_flag=True, help="Go on from the checkpoints in work/.")
def main(
    out: Path,
    stdlib: Path | None,
    gsm8k: Path | None,
    minutes: float | None,
    steps: int | None,
    unloop_minutes: float,
    unloop_steps: int | None,
    draft_minutes: float,
    draft_steps: int | None,
    draft: bool,
    decay: float,
    humaneval: Path | None,
    gsm8k_test: Path | None,
    seed: int,
    threads: int | None,
    compile_: bool,
    resume: bool,
) -> None:
    """Train a tiny Llama on Python's standard library and GSM8K, and a draft of it a tenth its size."""
    torch.set_num_threads(threads or os.cpu_count() or 1)
    console = Console()
    work = out / "work"
    console.print("Reading the corpus")
    corpus = read_corpus(stdlib or stdlib_folder(), gsm8k, seed)
    tokenizer = load_tokenizer(corpus, work, resume)

    def source(epoch: int) -> NDArray[np.uint16]:
        return epoch_tokens(corpus, tokenizer, seed + epoch)

    plan = Plan(minutes=None if steps else minutes or 76.0, steps=steps, decay=decay, seed=seed, compile=compile_)
    target, target_state = train("tiny", TARGET, plan, source, work, resume=resume, console=console)
    if unloop_minutes or unloop_steps:
        unlooped(target, target_state, corpus, tokenizer, work, unloop_minutes, unloop_steps, seed, resume, console)
    export(target, tokenizer, out / "tiny")
    models: dict[str, tuple[TinyLlama, State]] = {"tiny": (target, target_state)}
    if draft:
        draft_plan = Plan(
            minutes=None if draft_steps else draft_minutes,
            steps=draft_steps,
            matrix_lr=8e-3,
            other_lr=8e-3,
            distill=0.8,
            lengths=((0.0, 512), (0.9, 1024)),
            seed=seed + 1000,
            compile=compile_,
        )
        model, state = train(
            "tiny-draft", DRAFT, draft_plan, source, work, teacher=target.eval(), resume=resume, console=console
        )
        export(model, tokenizer, out / "tiny-draft")
        models["tiny-draft"] = (model, state)

    # Imported here because measuring needs transformers, which training does not.
    from research.train.card import write_cards

    write_cards(out, models, corpus, tokenizer, humaneval, gsm8k_test, console)


if __name__ == "__main__":
    main()
