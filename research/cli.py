"""`python -m research COMMAND`: measurements, figures and models of the project itself.

A command's module is imported when the command runs, since most of them need torch.
"""

from __future__ import annotations

from importlib import import_module

import click

from leapahead.cli.command import Program
from leapahead.core.errors import needing

COMMANDS = {  # name -> where it is, and what it does
    "figures": ("research.figures:main", "Measure all figures of the documentation."),
    "families": ("research.families:main", "Load a tiny model of every family, and write what each gets."),
    "exact-families": ("research.exact_families:main", "Compare texts in exact mode: windows, experts, all engines."),
    "priors": ("research.priors:main", "Measure the planner's initial acceptance estimates."),
    "oracle": ("research.oracle:main", "Measure auto without each source, and an oracle over their candidates."),
    "overhead": ("research.overhead:main", "Measure the time of a step outside the forward."),
    "steps-against": ("research.steps_against:main", "Compare the time of whole steps with another checkout's."),
    "drafting": ("research.drafting:main", "Measure the time of drafting, compiled and in Python."),
    "vllm-drafting": ("research.vllm_drafting:main", "Measure the time of drafting inside vLLM, without vLLM."),
    "crowded": ("research.crowded:main", "Compare decoding beside busy programs with threads that sleep or spin."),
    "crowded-loading": ("research.crowded_loading:main", "How long a model takes to load beside busy programs."),
    "busy": ("research.busy:main", "Compare auto after a first run on a busy machine with auto after an idle one."),
    "sampling": ("research.sampling:main", "Measure the time of choosing a token."),
    "regret": ("research.regret:main", "Measure the regret of planning where the latency profile is wrong."),
    "standin": ("research.standin:main", "Write a stand-in model: a small model's text at a larger one's cost."),
    "standin-head": ("research.standin_head:main", "Write a head of the bundled model as one of a stand-in model."),
    "heads-prompts": ("research.heads:main", "Write the prompts on whose texts the bundled model's heads are trained."),
    "exercises": ("research.exercises:main", "Write prompts in the form of programming exercises, to distil on."),
    "edits": ("research.edits:main", "Write prompts with simulated predictions of their texts."),
    "hybrid-gguf": ("research.hybrid_gguf:main", "Write a stand-in in a hybrid's shapes as a GGUF file."),
    "llama-bench": ("research.llama_bench:main", "Compare the llama.cpp target with llama.cpp's own programs."),
    "curve": ("research.curve:main", "Draw T(n) of GGUF files for every n, under builds and options of llama.cpp."),
    "limits": ("research.limits:main", "Compute what drafts gain in the measured times of forwards."),
    "switching": ("research.switching:main", "Measure steps after steps of the same size and of another."),
    "prompt-rows": ("research.prompt_rows:main", "Measure what prompts' forwards tell drafters, and its price."),
    "systems": ("research.systems.command:main", "Measure every system of the literature, each by its own command."),
    "serving": ("research.serving:main", "Compare leapahead's server with llama.cpp's, under one client."),
    "serving-stall": ("research.serving_stall:main", "Measure what running streams notice of a long prompt."),
    "serving-memory": ("research.serving_memory:main", "Read the memory of leapahead's server over many requests."),
    "serving-overhead": ("research.serving_overhead:main", "Measure what a streamed token costs beyond LLM.generate."),
    "cost": ("research.commands:cost", "Draw the latency profile."),
    "compression": ("research.commands:compression", "Draw lookahead's step compression."),
    "jacobi": ("research.commands:jacobi", "Draw the convergence of Jacobi iteration."),
    "pool": ("research.commands:pool", "Draw size and hit rate of lookahead's n-gram pool."),
    "match": ("research.commands:match", "Draw accepted tokens of prompt lookup by match length."),
    "expected": ("research.commands:expected", "Compute the expected speed-up of one draft."),
    "growth": ("research.commands:growth", "Draw time and memory of text indexes."),
    "calibration": ("research.commands_drafts:calibration", "Draw observed against predicted acceptance."),
    "gpu": ("research.gpu.command:main", "Measure decoding on a GPU, cell by cell, and what it reaches."),
    "gpu-simulated": ("research.gpu.simulated:main", "Simulate drafting on captured forwards in a GPU's times."),
    "repair": ("research.train.repair:main", "Train a small encoder-decoder that repairs damaged code."),
    "repair-draft": ("research.train.repair_draft:main", "Write what a draft model of that model is trained from."),
    "repair-acceptance": ("research.repair_figures:main", "Measure acceptance lengths on that model."),
    "devices": ("research.devices.command:main", "Simulate methods for several devices, from measurements on one."),
    "sequoia": ("research.commands_drafts:sequoia", "Draw the best tree for a draft model."),
    "triforce": ("research.triforce:main", "Measure drafting over a part of a long context's cache."),
}


class Research(Program):
    """Imports a command when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        with needing(f"research {cmd_name}", "transformers", "torch", "transformers", "safetensors"):
            command: click.Command = getattr(import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, description) for name, (_, description) in COMMANDS.items()])


@click.group(cls=Research, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Measurements, figures and models of the leapahead project. Run it in a checkout."""
