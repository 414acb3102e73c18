"""The recipe of a small encoder-decoder that repairs code: a T5 of 3 million parameters, trained on one core.

    encoder input   `def save(self, pth):` / `    self.wrote = path`     a few lines of Python's library, damaged
    text            `def save(self, path):` / `    self.wrote = path`    the same lines as they were

Most of a text is a copy of the input, as in grammar correction, editing and much of translation. The damage is of the
kind that typing does: characters that are missing, doubled, exchanged or wrong, and indentation that is off. Files that
are held out by `research.train.data` are never trained on.
"""

from __future__ import annotations

import math
import random
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration

from leapahead.cli.command import Command
from leapahead.models.transformers import pretrained
from research.train.data import read_corpus, stdlib_folder
from research.train.loop import Checkpoint, Plan, State
from research.train.tokenizer import END, USER, train_tokenizer, write_json

VOCABULARY = 1024
EOS, PAD = 0, 1  # END and USER of the tokenizer; a text begins with the padding token, as T5's do
LONGEST = 120  # characters of an example
# Added to the bias of distances at the beginning, so that a head of every layer looks at the token before, and one of
# the encoder at the token behind, which copying is learned from.
NEIGHBOUR = 5.0
LETTERS = "abcdefghijklmnopqrstuvwxyz_(),.:="
REPORTED = 20  # steps between two lines of the report

Example = tuple[list[int], list[int]]  # encoder input, text with EOS


def damaged(text: str, rng: random.Random) -> str:
    """The text with 1 to 4 typing errors."""
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(text))
        kind = rng.randrange(5)
        if kind == 0 and len(text) > 2:
            text = text[:at] + text[at + 1 :]
        elif kind == 1:
            text = text[:at] + text[at] + text[at:]
        elif kind == 2:
            text = text[:at] + text[at + 1 : at + 2] + text[at : at + 1] + text[at + 2 :]
        elif kind == 3:
            text = text[:at] + rng.choice(LETTERS) + text[at + 1 :]
        else:
            lines = text.split("\n")
            which = rng.randrange(len(lines))
            lines[which] = rng.choice((" ", "  ", "")) + lines[which].lstrip(" ")
            text = "\n".join(lines)
    return text


def snippets(text: str, rng: random.Random) -> Iterator[str]:
    """One to four successive lines at a time, at most `LONGEST` characters, without common indentation."""
    some: list[str] = []
    most = rng.randint(1, 4)
    for line in [*text.split("\n"), ""]:
        if line.strip() and len(some) < most and sum(map(len, some)) + len(line) < LONGEST:
            some.append(line)
            continue
        found = textwrap.dedent("\n".join(some))
        if 10 < len(found) <= LONGEST:
            yield found
        some = [line] if line.strip() and len(line) < LONGEST else []
        most = rng.randint(1, 4)


def pairs(texts: Sequence[str], rng: random.Random) -> Iterator[tuple[str, str]]:
    """Damaged and sound snippets of the texts, again and again in other orders and with other damage."""
    while True:
        found = [each for text in texts for each in snippets(text, rng)]
        rng.shuffle(found)
        for sound in found:
            yield damaged(sound, rng), sound


def shape() -> T5Config:
    """A T5 of 3 encoder and 3 decoder layers."""
    return T5Config(
        vocab_size=VOCABULARY,
        d_model=192,
        d_kv=48,
        d_ff=512,
        num_layers=3,
        num_heads=4,
        dropout_rate=0.0,
        feed_forward_proj="relu",
        eos_token_id=EOS,
        pad_token_id=PAD,
        decoder_start_token_id=PAD,
    )


def new_model() -> Any:
    """A T5 with random weights, some of whose heads look at neighbours."""
    model = T5ForConditionalGeneration(shape())
    behind = shape().relative_attention_num_buckets // 2 + 1  # the encoder's bucket of the next token
    with torch.no_grad():
        for stack, head, bucket in ((model.encoder, 0, 1), (model.encoder, 1, behind), (model.decoder, 0, 1)):
            stack.block[0].layer[0].SelfAttention.relative_attention_bias.weight[bucket, head] += NEIGHBOUR
    return model


class Batches:
    """Batches of examples of like lengths, from pairs of texts."""

    def __init__(self, texts: Sequence[str], tokenizer: Tokenizer, rows: int, seed: int) -> None:
        self._tokenizer, self._rows, self._rng = tokenizer, rows, random.Random(seed)
        self._pairs = pairs(texts, self._rng)
        self._ready: list[list[Example]] = []

    def next(self) -> dict[str, Tensor]:
        """What the model is given: input ids, their mask and labels, [rows, tokens]."""
        if not self._ready:
            some = [next(self._pairs) for _ in range(16 * self._rows)]
            ids = [[self._tokenizer.encode(text).ids for text in pair] for pair in some]
            examples = sorted([(source, [*text, EOS]) for source, text in ids], key=lambda each: len(each[1]))
            self._ready = [examples[at : at + self._rows] for at in range(0, len(examples), self._rows)]
            self._rng.shuffle(self._ready)
        return _padded(self._ready.pop())


def _padded(examples: Sequence[Example]) -> dict[str, Tensor]:
    sources, texts = [source for source, _ in examples], [text for _, text in examples]
    longest, most = max(map(len, sources)), max(map(len, texts))
    return {
        "input_ids": torch.tensor([[*each, *[PAD] * (longest - len(each))] for each in sources]),
        "attention_mask": torch.tensor([[1] * len(each) + [0] * (longest - len(each)) for each in sources]),
        "labels": torch.tensor([[*each, *[-100] * (most - len(each))] for each in texts]),
    }


def optimizers_of(model: nn.Module, plan: Plan) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for embeddings, biases of positions and norms."""
    named = dict(model.named_parameters())
    matrices = [each for name, each in named.items() if each.dim() == 2 and ".block." in name and "bias" not in name]
    others = [each for each in named.values() if not any(each is matrix for matrix in matrices)]
    return [
        torch.optim.Muon(matrices, lr=plan.matrix_lr, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=plan.other_lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def train_repair(
    texts: Sequence[str], tokenizer: Tokenizer, plan: Plan, work: Path, rows: int, resume: bool, console: Console
) -> tuple[Any, State]:
    """Trains the model for the minutes of the plan, of processor time; with `resume` from its last checkpoint."""
    torch.manual_seed(plan.seed)
    model = new_model().train()
    optimizers, checkpoint = optimizers_of(model, plan), Checkpoint(work, "repair")
    state = checkpoint.load(model, optimizers) if resume and checkpoint.exists() else State()
    assert plan.minutes is not None
    state.done = state.done and state.seconds >= 60.0 * plan.minutes  # a longer plan goes on
    batches = Batches(texts, tokenizer, rows, plan.seed + state.step)
    console.print(f"{sum(each.numel() for each in model.parameters()):,} parameters, from step {state.step}")
    started, saved = time.process_time(), time.monotonic()
    before = state.seconds
    while not state.done:
        state.seconds = before + time.process_time() - started
        progress = state.seconds / (60.0 * plan.minutes)
        if progress >= 1.0:
            state.done = True
            break
        loss = _update(model, optimizers, batches.next(), plan, progress)
        state.step += 1
        state.loss = loss if math.isnan(state.loss) else 0.98 * state.loss + 0.02 * loss
        if state.step % REPORTED == 0:
            console.print(f"step {state.step}, {state.seconds:.0f} s, loss {state.loss:.3f}")
        if time.monotonic() - saved > plan.checkpoint_seconds:
            checkpoint.save(model, optimizers, state)
            saved = time.monotonic()
    checkpoint.save(model, optimizers, state)
    return model.eval(), state


def _update(
    model: Any, optimizers: Sequence[torch.optim.Optimizer], batch: dict[str, Tensor], plan: Plan, progress: float
) -> float:
    for optimizer, rate in zip(optimizers, (plan.matrix_lr, plan.other_lr), strict=True):
        for group in optimizer.param_groups:
            group["lr"] = rate * plan.rate(progress)
    loss: Tensor = model(**batch).loss
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return loss.item()


def export(model: Any, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes the model and its tokenizer as a folder of Transformers, the weights in bfloat16."""
    model.to(torch.bfloat16)
    model.config.dtype = torch.float32  # computed in float32, which holds the weights exactly
    pretrained.save(model, None, folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": USER}
    write_json(folder / "tokenizer_config.json", {**names, "clean_up_tokenization_spaces": False})


def held_out(count: int, seed: int = 1) -> list[tuple[str, str]]:
    """Damaged and sound snippets of the files that are held out, spread over them."""
    rng = random.Random(seed)
    texts = read_corpus(stdlib_folder(), None).heldout["code"]
    some = [each for text in texts for each in snippets(text, rng) if len(each) > LONGEST // 2]
    return [(damaged(sound, rng), sound) for sound in rng.sample(some, min(count, len(some)))]


@click.command(cls=Command)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("build/repair"),
    show_default=True,
    help="Folder of the model and the checkpoint.",
)
@click.option("--minutes", type=float, default=14.0, show_default=True, help="Processor time of all runs together.")
@click.option("--rows", type=click.IntRange(min=1), default=32, show_default=True, help="Examples of a batch.")
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True, help="Threads of torch.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the weights and the examples.")
@click.option("--resume", is_flag=True, help="Go on from the checkpoint in OUT/work.")
def main(out: Path, minutes: float, rows: int, threads: int, seed: int, resume: bool) -> None:
    """Train a small encoder-decoder that repairs damaged lines of Python's standard library."""
    torch.set_num_threads(threads)
    console = Console()
    texts = read_corpus(stdlib_folder(), None, 0).files
    (out / "work").mkdir(parents=True, exist_ok=True)
    kept = out / "work" / "tokenizer.json"
    if resume and kept.exists():
        tokenizer = Tokenizer.from_file(str(kept))
    else:
        tokenizer = train_tokenizer(texts, VOCABULARY)
        tokenizer.save(str(kept))
    plan = Plan(minutes=minutes, matrix_lr=6e-3, other_lr=4e-3, seed=seed, checkpoint_seconds=25.0)
    model, state = train_repair(texts, tokenizer, plan, out / "work", rows, resume, console)
    export(model, tokenizer, out / "model")
    console.print(f"{state.step} steps in {state.seconds / 60:.1f} minutes, loss {state.loss:.3f}: {out / 'model'}")
