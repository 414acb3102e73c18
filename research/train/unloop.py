"""A short last stage that trains the loops of greedy decoding away.

Small models trained by likelihood alone repeat themselves when they are decoded greedily. Sequence-level
unlikelihood (Welleck et al., 2019, "Neural Text Generation with Unlikelihood Training") is the remedy at training
time: let the model complete prompts *from the training data*, find the tokens that complete a 4-gram for a second
time, and lower their probability, next to the usual likelihood on real text. Nothing changes at decoding.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from research.train.data import Corpus
from research.train.model import TinyLlama
from research.train.tokenizer import ASSISTANT, USER

NEW_TOKENS = 128


def repeated(ids: Sequence[int], n: int = 4) -> list[bool]:
    """Return for each position whether it completes an n-gram that ``ids`` has had before."""
    seen: set[tuple[int, ...]] = set()
    marks = [False] * len(ids)
    for end in range(n, len(ids) + 1):
        gram = tuple(ids[end - n : end])
        marks[end - 1] = gram in seen
        seen.add(gram)
    return marks


class Prompts:
    """What completions start from: documented functions up to their body and, a quarter of them, questions."""

    def __init__(self, corpus: Corpus, tokenizer: Tokenizer, longest: int = 160) -> None:
        questions: list[str] = []
        for question, _ in corpus.questions:
            questions += [question + "\n", f"{USER}\n{question}\n{ASSISTANT}\n"]
        self.kinds: list[list[list[int]]] = []
        for texts in ([head for head, _ in corpus.documented], questions):
            rows = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            self.kinds.append([row.ids for row in rows if 16 <= len(row.ids) <= longest])

    def sample(self, rng: random.Random, count: int) -> list[list[int]]:
        """Return ``count`` random prompts."""
        code, questions = self.kinds
        asked = min(count // 4, len(questions))
        return rng.sample(code, count - asked) + rng.sample(questions, asked)


def left_padded(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return ids padded on the left with zeros, and the attention mask."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


def unlikelihood(model: Any, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, float]:
    """Return the loss on the model's own greedy completions, and the share of their tokens that repeat.

    The end of text does not stop a completion, so what comes after it is trained, too.
    """
    ids, mask = left_padded(prompts)
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        out = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
        )
    model.train()
    new = out[:, ids.shape[1] :]
    marks = torch.tensor([repeated(row) for row in new.tolist()])
    full = torch.cat((mask, torch.ones_like(new)), dim=1)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=out[:, :-1], attention_mask=full[:, :-1], logits_to_keep=NEW_TOKENS).logits
    chosen = F.log_softmax(logits.float(), dim=-1).gather(-1, new[..., None]).squeeze(-1)
    other = torch.log((1.0 - chosen.exp()).clamp(min=1e-4))
    return -(other * marks).sum() / marks.numel(), float(marks.float().mean())


def unloop(
    model: TinyLlama,
    prompts: Prompts,
    row: NDArray[np.uint16],
    *,
    minutes: float | None = None,
    steps: int | None = None,
    rate: float = 3e-4,
    batch: int = 24,
    length: int = 512,
    seed: int = 0,
    console: Console | None = None,
) -> tuple[int, float]:
    """Train ``model`` in place for ``minutes`` or ``steps``; return the steps and minutes it took.

    Each step adds the likelihood's gradient on eight windows of the packed training data ``row``.
    """
    console = console or Console()
    rng = random.Random(seed)
    # transformers' model has the cache that generating every batch needs, and masks for prompts of many lengths.
    general = LlamaForCausalLM(LlamaConfig(**model.shape.llama_config(0)))
    general.load_state_dict({**model.state_dict(), "lm_head.weight": model.model.embed_tokens.weight})
    general.tie_weights()
    general.generation_config.eos_token_id = None
    optimizer = torch.optim.AdamW(general.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.0)
    started, step, average = time.monotonic(), 0, math.nan
    while True:
        elapsed = (time.monotonic() - started) / 60
        progress = step / steps if steps is not None else elapsed / (minutes or 1.0)
        if progress >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 8, 1.0 - progress)
        loss, share = unlikelihood(general, prompts.sample(rng, batch))
        loss.backward()  # type: ignore[no-untyped-call]
        start = rng.randrange(len(row) - 8 * length)
        window = torch.from_numpy(row[start : start + 8 * length + 1].astype(np.int64))
        with torch.autocast("cpu", torch.bfloat16):
            logits = general(input_ids=window[:-1].view(8, length)).logits
        likelihood = F.cross_entropy(logits.float().flatten(0, 1), window[1:])
        likelihood.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(general.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        average = share if math.isnan(average) else 0.8 * average + 0.2 * share
        if step % 5 == 0:
            console.print(
                f"unloop step {step} {100 * progress:.0f}% loss {likelihood.item():.3f} repeated {100 * average:.1f} %"
            )
    trained = general.state_dict()
    model.load_state_dict({name: trained[name] for name in model.state_dict()})
    return step, elapsed
