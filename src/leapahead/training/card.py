"""The model card of a trained head, and the curves of a training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from leapahead.bench import plots
from leapahead.bench.conditions import Data
from leapahead.core.errors import BadParameter
from leapahead.drafters.heads.config import (
    DFLASH,
    DFLASH2,
    EAGLE,
    EAGLE3,
    FUSED,
    HYDRA,
    HYDRA_PREFIX,
    MEDUSA,
    PASS,
    PEAGLE,
    SPACE,
)
from leapahead.training.block_recipes import BLOCKS
from leapahead.training.evaluate import CANDIDATES, DEPTH, FRONTIER, NODES, Evaluation
from leapahead.training.loop import State
from leapahead.training.recipe import Recipe
from leapahead.training.settings import ADAMW, CLLM, DRAFT, MUON, PARD, RunSettings, Settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMES = {
    MEDUSA: "Medusa",
    EAGLE: "EAGLE",
    EAGLE3: "EAGLE-3",
    PEAGLE: "P-EAGLE",
    HYDRA: "Hydra",
    HYDRA_PREFIX: "Hydra++",
    DFLASH: "DFlash",
    DFLASH2: "DFlash 2",
    PASS: "PaSS",
    SPACE: "SPACE",
    DRAFT: "the draft model",
    PARD: "the draft model",
    CLLM: "the tuning",
}
PAPERS = {
    MEDUSA: "2401.10774",
    EAGLE: "2401.15077",
    EAGLE3: "2503.01840",
    PEAGLE: "2602.01469",
    HYDRA: "2402.05109",
    HYDRA_PREFIX: "2402.05109",
    DFLASH: "2602.06036",
    DFLASH2: "vLLM #52816",
    PASS: "2311.13581",
    SPACE: "2402.11809",
}
OPTIMIZERS = {ADAMW: "AdamW", MUON: "Muon for the matrices of hidden layers, AdamW for all other weights"}
FORMATS = {
    MEDUSA: "vLLM's",
    EAGLE: "EAGLE's own",
    EAGLE3: "the speculators",
    PEAGLE: "the speculators",
    HYDRA: "Hydra's own",
    HYDRA_PREFIX: "Hydra's own",
    DFLASH: "the speculators",
    DFLASH2: "the speculators",
}


@dataclass(frozen=True)
class Run:
    """What a model card tells of a training.

    Attributes:
        settings: complete.
        texts, tokens: number of texts that were trained on, and of tokens of their answers.
        sampled: share of these texts that were sampled at temperature 1.
        data: names of the files of prompts.
        state: at the end.
        evaluations: of what was trained.
        conditions: of the measurements, see `leapahead.bench.conditions`.
        command: that was given; "" where there was none.
    """

    settings: RunSettings
    texts: int
    tokens: int
    sampled: float
    data: Sequence[str]
    state: State
    evaluations: Sequence[Evaluation]
    conditions: Data
    command: str = ""


def text(recipe: Recipe, run: Run) -> str:
    """The content of `README.md`."""
    config = recipe.config
    name = NAMES[config.kind]
    parameters = sum(each.numel() for each in recipe.parameters.values())
    vocabulary = f"{config.draft_vocab_size:,} of {config.vocab_size:,} tokens"
    rows = [
        ("Target", f"`{config.target}`"),
        ("Kind", f"{name} ({PAPERS[config.kind]}), in {FORMATS[config.kind]} format"),
        ("Parameters", f"{parameters:,}, {str(recipe.target.output.dtype).removeprefix('torch.')}"),
        ("Vocabulary", "all tokens" if recipe.vocabulary is None else vocabulary),
        *([("Hidden states of layers", ", ".join(map(str, config.layers)))] if config.kind in FUSED else []),
        *([("Tokens of a forward", str(config.depths))] if config.depths else []),
    ]
    body = [
        f"# {name} head for {config.target}\n",
        f"A trained drafter for `{config.target}`. It predicts several tokens ahead from the hidden states of that "
        "model, which\nverifies them in one forward pass: the text is the model's own.\n",
        "| | |\n| --- | --- |\n" + "".join(f"| {key} | {value} |\n" for key, value in rows),
        "## Use\n",
        "    leapahead generate -m MODEL --head FOLDER PROMPT\n",
        f"## Training\n\n{training(run, _method(run.settings))}",
        "![Loss and agreement](curves.png)\n",
        f"## Measured\n\n{measured(run.evaluations, PLACES)}",
    ]
    return whole(body, run, config.target, config.kind)


def whole(body: Sequence[str], run: Run, base: str, tag: str) -> str:
    """A model card of these paragraphs, with what every one begins and ends with.

    Args:
        body: its paragraphs.
        run: that it tells of.
        base: the model that was trained for, or from.
        tag: what was trained.
    """
    front = f"---\nlibrary_name: leapahead\nbase_model: {base}\ntags: [speculative-decoding, {tag}]\n---\n"
    command = [f"## Command\n\n    {run.command}\n"] if run.command else []
    return front + "\n".join([*body, *command, f"Trained with leapahead {run.conditions['versions']['leapahead']}.\n"])


def _method(settings: RunSettings) -> str:
    """How a head is trained."""
    assert isinstance(settings, Settings), "a head was trained"
    heads = (
        "Every head starts with a copy of the target's output layer and reads the tokens of the text before its own; "
        f"the loss of head k has the weight 0.8^k; loss {settings.loss}."
    )
    blocks = (
        f"{BLOCKS} blocks of each text in every step; the loss of depth d has the weight 0.8^d; loss {settings.loss}."
    )
    return {
        HYDRA: heads,
        HYDRA_PREFIX: f"{heads} A decoder layer over the target's states gives what the heads read.",
        DFLASH: blocks,
        DFLASH2: f"{blocks} The loss of the selector over its candidates is added.",
        MEDUSA: "Every head starts as a copy of the target's output layer; the loss of head k has the weight 0.8^k; "
        f"loss {settings.loss}.",
        PEAGLE: f"{settings.depths - 1} masks behind every place of the answers; the loss of depth d has the weight "
        f"0.8^d; loss {settings.loss}.",
        EAGLE: f"Loss: smooth L1 of the states + 0.1 {settings.loss}; uniform noise of width 0.2 on the states.",
        EAGLE3: f"The head is continued from its own states for {settings.depths} steps, whose losses have the weights "
        f"0.8^step; loss {settings.loss}.",
    }[settings.kind]


def training(run: Run, method: str) -> str:
    """The paragraph that tells on which texts and how long was trained; `method` is its last sentence."""
    settings, state = run.settings, run.state
    texts = min(settings.batch, run.texts) * settings.accumulate
    files = " and ".join(f"`{name}`" for name in run.data)
    return (
        f"{run.texts:,} texts of the target, {run.tokens:,} tokens of its answers to the prompts of {files};\n"
        f"{run.sampled:.0%} of them sampled at temperature 1, the others greedy. {state.step:,} steps of {texts} texts "
        f"({state.step * texts / max(1, run.texts):.1f} epochs)\nin {state.seconds / 60:.1f} minutes on "
        f"{run.conditions['gpu'] or run.conditions['cpu']}. {OPTIMIZERS[settings.optimizer]}; "
        f"learning rate {settings.lr:g}, warm-up and {settings.schedule} decay.\n{method}\n"
    )


def write(folder: Path, content: str, data: Data) -> None:
    """Writes a model card and its curves into a folder that exists.

    Raises:
        BadParameter: a file cannot be written.
    """
    try:
        (folder / "README.md").write_text(content, encoding="utf-8")
        plots.save(curves, data, folder / "curves", kinds=("png",))
    except OSError as error:
        raise BadParameter(f"{folder} cannot be written: {error.strerror or error}") from None


PLACES = (
    "The head drafts once at every place of texts that it was not trained on. Columns 1 to 5: how often the token "
    "at that\ndepth of a chain is right where those before it are. The last two columns: tokens per forward of the "
    f"target, which are 1\nwithout drafts; the tree has the {NODES} likeliest nodes, with {CANDIDATES} candidates "
    f"after each of {FRONTIER} nodes of a level.\n"
)
DECODED = (
    "Decoding of prompts that were not trained on, with this head alone. Columns 1 to 5: how often the token at that "
    "depth of a\nchain is accepted where those before it are. The last two columns: committed tokens per forward of "
    f"the target, which\nare 1 without drafts; the tree has at most {NODES} nodes.\n"
)


def measured(evaluations: Sequence[Evaluation], how: str) -> str:
    """A table with a row for every set of texts; `how` tells how it was measured."""
    if not evaluations:
        return "No texts were held out.\n"
    depths = " | ".join(str(depth) for depth in range(1, DEPTH + 1))
    lines = [
        how,
        f"| Texts | Number | Tokens | {depths} | Tokens per forward, chain of {DEPTH} | Tree of {NODES} |",
        f"| --- | ---: | ---: | {' | '.join(['---:'] * DEPTH)} | ---: | ---: |",
    ]
    for each in evaluations:
        rates = " | ".join(f"{rate:.2f}" for rate in each.depths)
        lines.append(f"| {each.name} | {each.texts} | {each.tokens} | {rates} | {each.chain:.2f} | {each.tree:.2f} |")
    return "\n".join(lines) + "\n"


def figures(run: Run, agreement: Sequence[str] = ()) -> Data:
    """The data of `curves`; `agreement` names what was measured beside the loss, by default one depth each."""
    return {
        "kind": NAMES[run.settings.kind],
        "agreement": list(agreement),
        "points": run.state.points,
        "held_out": run.state.held_out,
        "evaluations": [asdict(each) for each in run.evaluations],
        "conditions": run.conditions,
    }


def curves(data: Data) -> Figure:
    """The loss over the steps, and how often each depth was right; lines of the training, markers of held-out texts."""
    note = "lines: batches of the training, means of 10 steps; markers: held-out texts"
    figure, (left, right) = plots.subplots(2, data, note)
    points, held = data["points"], data["held_out"]
    left.plot([row[0] for row in points], [row[1] for row in points], color=plots.COLOURS[0], label="training")
    left.plot([row[0] for row in held], [row[1] for row in held], "o", color=plots.COLOURS[1], label="held out")
    left.set(title=f"Loss of {data['kind']}", xlabel="step", ylabel="loss")
    left.set_ylim(bottom=0)
    left.legend()
    depths = len((points or held)[0]) - 2 if points or held else 0
    names = data["agreement"] or [f"depth {depth + 1}" for depth in range(depths)]
    for depth in range(depths):
        colour, marker = plots.COLOURS[depth % len(plots.COLOURS)], plots.MARKERS[depth % len(plots.MARKERS)]
        right.plot([row[0] for row in points], [row[2 + depth] for row in points], color=colour, linewidth=1)
        right.plot([row[0] for row in held], [row[2 + depth] for row in held], marker, color=colour, label=names[depth])
    title = "Agreement" if data["agreement"] else "Likeliest token is the text's, each depth alone"
    right.set(title=title, xlabel="step", ylabel="share of places")
    right.set_ylim(0, 1)
    if depths:  # there are none after a few steps without held-out texts
        right.legend()
    return figure
