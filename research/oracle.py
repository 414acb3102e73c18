"""`python -m research oracle`: what `auto` accepts with a fixed number of nodes, and what its candidates would allow.

    recycling, suffix      each alone
    auto                   with all sources, then without each of them
    oracle                 a tree from the same candidates in which the target's choice is always taken where some
                           source proposes it: an upper bound for any way of choosing among them

Every text is compared with plain decoding's. What the target keeps of earlier prompts is dropped before each prompt.
Unless `--drafter-cache` is given, nothing that drafters learned from one prompt serves the next, except the acceptance
estimates.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import click

from leapahead.bench import tasks
from leapahead.check import distinct
from leapahead.cli import screen
from leapahead.cli.command import Command
from leapahead.core.sampling import SamplingParams
from leapahead.core.stats import Stats
from leapahead.core.stop import StopParams
from leapahead.drafters.auto import DEFAULT, Auto
from leapahead.drafters.base import Drafter
from leapahead.drafters.cache import DrafterCache
from leapahead.engine.request import Request
from leapahead.engine.scheduler import Engine
from leapahead.models import loading
from leapahead.models.base import CHAIN, TOP_K, Capture, KeepsPrefixes
from leapahead.models.choices import PromptRows
from leapahead.planner.draft import SequenceView, Step
from leapahead.planner.source import Candidate, Score, Source
from research.command_parts import show

TEMPERATURES = (0.0, 1.0)
CERTAIN = 50.0  # log-probability of the token that the text has: above any noise
Texts = dict[tuple[int, ...], list[int]]  # prompt -> prompt and new tokens

# A state: whether the draft has followed the text so far, the position, and the states of the sources.
State = tuple[bool, int, tuple[Any, ...]]


class Perfect(Source):
    """All candidates of some sources; where the text's next token is among them, it is marked and comes first."""

    name: ClassVar[str] = "oracle"
    needs: ClassVar[frozenset[str]] = frozenset({CHAIN, TOP_K})
    capture: ClassVar[Capture] = Capture(top_k=128)

    def __init__(self, sources: list[Source], text: Sequence[int]) -> None:
        self.sources, self.text = sources, text

    def begin(self, sequence: SequenceView) -> None:
        for source in self.sources:
            source.begin(sequence)

    def read_prompt(self, sequence: SequenceView, rows: PromptRows) -> None:
        for source in self.sources:
            source.read_prompt(sequence, rows)

    def read(self, sequence: SequenceView) -> None:
        for source in self.sources:
            source.read(sequence)

    def observe(self, sequence: SequenceView, step: Step) -> None:
        for source in self.sources:
            source.observe(sequence, step)

    def finish(self, sequence: SequenceView) -> None:
        for source in self.sources:
            source.finish(sequence)

    def root(self, sequence: SequenceView) -> State:
        return True, len(sequence.tokens), tuple(source.root(sequence) for source in self.sources)

    def follow(self, state: State, token: int) -> State:
        on_text, at, states = state
        below = [
            None if each is None else source.follow(each, token)
            for source, each in zip(self.sources, states, strict=True)
        ]
        return on_text and at < len(self.text) and self.text[at] == token, at + 1, tuple(below)

    def candidates(self, state: State, limit: int) -> list[Candidate]:
        proposed = [source.candidates(each, limit) for source, each in self._asked(state)]
        return self._marked(state, [each for some in proposed for each in some])

    def seed_aware_candidates(self, state: State, limit: int, score: Score) -> list[Candidate]:
        proposed = []
        for source, each in self._asked(state):
            if some := source.seed_aware_candidates(each, limit, score):
                scores = score([one.token for one in some], [one.logp for one in some]).tolist()
                best = sorted(range(len(some)), key=scores.__getitem__, reverse=True)[:limit]
                proposed += [some[index] for index in best]
        return self._marked(state, proposed)

    def _asked(self, state: State) -> list[tuple[Source, Any]]:
        return [(source, each) for source, each in zip(self.sources, state[2], strict=True) if each is not None]

    def _marked(self, state: State, proposed: Sequence[Candidate]) -> list[Candidate]:
        on_text, at, _ = state
        truth = self.text[at] if on_text and at < len(self.text) else -1
        best: dict[int, float] = {}
        for token, logp, _ in proposed:
            best[token] = max(logp, best.get(token, logp))
        found = [Candidate(token, logp, (0,)) for token, logp in best.items() if token != truth]
        if truth in best:
            found.append(Candidate(truth, CERTAIN, (1,)))
        return sorted(found, key=lambda each: each.logp, reverse=True)


class Oracle(Auto):
    """`auto` with the choice among its candidates made by an oracle.

    Args:
        texts: what plain decoding writes after each prompt.
    """

    name = "oracle"

    def __init__(self, texts: Texts, sources: str = "", nodes: int = 16) -> None:
        super().__init__(sources=sources, nodes=nodes)
        self._texts = texts

    def make_sources(self, sequence: SequenceView | None) -> list[Source]:
        text = self._texts[tuple(sequence.tokens)] if sequence is not None else ()
        return [Perfect(super().make_sources(sequence), text)]


class Setting(NamedTuple):
    """What is the same for all drafters.

    Attributes:
        loaded: the target.
        prompts: token ids by task.
        temperature: of sampling.
        tokens: greatest number of new tokens of a text.
        cache: whether drafters keep what they learn from one prompt to the next.
    """

    loaded: loading.Loaded
    prompts: dict[str, list[list[int]]]
    temperature: float
    tokens: int
    cache: bool


def decoded(setting: Setting, task: str, drafter: str | type[Drafter], **options: Any) -> tuple[Stats, Texts]:
    """All texts of a task, one after the other, and what decoding them took."""
    target = setting.loaded.target
    engine = Engine(target, tokenizer=setting.loaded.tokenizer, max_batch=1)
    attached, cache = engine.drafter(drafter, **options), DrafterCache() if setting.cache else None
    stop = StopParams(max_new_tokens=setting.tokens, eos_token_ids=setting.loaded.eos_token_ids)
    stats, texts = Stats(), {}
    for index, tokens in enumerate(setting.prompts[task]):
        if isinstance(target, KeepsPrefixes):
            target.forget()
        sampling = SamplingParams(temperature=setting.temperature, seed=1000 + index)
        handle = engine.submit(Request(tokens, attached, sampling=sampling, stop=stop, drafter_cache=cache))
        engine.run([handle])
        stats += handle.stats
        texts[tuple(tokens)] = [*tokens, *handle.tokens]
    return stats, texts


def measured(setting: Setting, nodes: int, bar: screen.Bar) -> list[dict[str, Any]]:
    """A row for each task and drafter."""
    names = [name for name in DEFAULT if name != "prediction"]  # which has no candidates without a prediction
    every = ",".join(names)
    alone: list[tuple[str, str | type[Drafter], dict[str, Any]]] = [
        ("recycling", "recycling", {}),
        ("suffix", "suffix", {}),
        ("auto", "auto", {"sources": every}),
        *((f"auto without {out}", "auto", {"sources": ",".join(n for n in names if n != out)}) for out in names),
    ]
    rows = []
    for task in setting.prompts:
        _, plain = decoded(setting, task, "plain")
        grams = distinct([tuple(text[len(prompt) :]) for prompt, text in plain.items()])
        ways = [*alone, ("oracle", Oracle, {"texts": plain, "sources": every})]
        for done, (name, drafter, options) in enumerate(ways):
            bar(f"{task}, temperature {setting.temperature:g}: {name}", done, len(ways))
            stats, texts = decoded(setting, task, drafter, nodes=nodes, **options)
            rows.append(
                {
                    "task": task,
                    "temperature": setting.temperature,
                    "name": name,
                    "acceptance_length": round(stats.acceptance_length, 3),
                    "drafted_per_step": round(stats.drafted / stats.steps, 2),
                    "tokens": stats.committed,
                    "distinct_4": round(grams, 3),
                    "different": sum(texts[prompt] != text for prompt, text in plain.items()),
                }
            )
    return rows


@click.command(cls=Command)
@click.option("-m", "--model", default=None, help="A model; by default the bundled one.")
@click.option(
    "--data",
    required=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of prompt sets, with humaneval.jsonl and gsm8k_test.jsonl.",
)
@click.option("--prompts", default=20, show_default=True, help="Prompts of each task.")
@click.option("--nodes", default=16, show_default=True, help="Drafted nodes of each step.")
@click.option("-n", "--max-new-tokens", default=128, show_default=True, help="Tokens of each text.")
@click.option("--drafter-cache", is_flag=True, help="Drafters keep what they learned of earlier prompts.")
@click.option("--out", required=True, type=click.Path(dir_okay=False, path_type=Path), help="JSON file to write.")
def main(
    model: str | None, data: Path, prompts: int, nodes: int, max_new_tokens: int, drafter_cache: bool, out: Path
) -> None:
    """Measure acceptance with each source of `auto` left out, and that of an oracle over its candidates."""
    loaded = loading.load(model, dtype="float32")
    read = tasks.read(data, [f"{task}={prompts}" for task in tasks.TEXTS])
    encoded = {task.name: tasks.encoded(task, loaded, max_new_tokens) for task in read}
    rows: list[dict[str, Any]] = []
    with screen.progress("oracle") as bar:
        for temperature in TEMPERATURES:
            setting = Setting(loaded, encoded, temperature, max_new_tokens, drafter_cache)
            rows += measured(setting, nodes, bar)
    conditions = {
        "model": loaded.target.info.fingerprint,
        "prompts": {task: len(each) for task, each in encoded.items()},
        "nodes": nodes,
        "max_new_tokens": max_new_tokens,
        "drafter_cache": drafter_cache,
    }
    out.write_text(json.dumps({"conditions": conditions, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    columns = [(task, temperature) for temperature in TEMPERATURES for task in encoded]
    by = {(row["name"], (row["task"], row["temperature"])): row for row in rows}
    show(
        ("drafter", *(f"{task}, T = {temperature:g}" for task, temperature in columns)),
        [
            (name, *(f"{by[name, column]['acceptance_length']:.2f}" for column in columns))
            for name in dict.fromkeys(row["name"] for row in rows)
        ],
    )
    grams = (f"{by['auto', column]['distinct_4']:.2f}" for column in columns)
    click.echo(f"distinct 4-grams: {', '.join(grams)}; texts that differ: {sum(row['different'] for row in rows)}")
