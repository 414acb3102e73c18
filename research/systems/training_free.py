"""Rows of systems that need no draft model and no trained head."""

from __future__ import annotations

from typing import Any

from research.systems.system import EXACT, NOT_FOUND, REPAIR, Published, System

SPEC_BENCH = "Vicuna-7B, Spec-Bench, greedy, A100"  # texts and hardware of the leaderboard's first table
LEADERBOARD = "Spec-Bench leaderboard, April 2025"
REPAIR_MODEL: dict[str, Any] = {
    "prompts": REPAIR,
    "needs": "an encoder-decoder model; here a small T5 that repairs code",
    "before": "python -m research repair",
}

TRAINING_FREE: tuple[System, ...] = (
    System(
        key="jacobi",
        name="Jacobi decoding of decoder-only models",
        paper="2305.10427",
        command="leapahead generate -d jacobi -o block=8",
        rule=EXACT,
        published=Published("1.05x", NOT_FOUND, "language models; hardware not told", "2403.00835, the authors' blog"),
        differs="The block slides over the text; guesses that are left are kept, and others are tokens that followed "
        "before. Sampling keeps the noise of each position.",
    ),
    System(
        key="jacobi-pj",
        name="Parallel Jacobi (PJ)",
        paper="2305.10427",
        command="leapahead generate -m build/repair/model -d jacobi -o variant=pj",
        rule=EXACT,
        published=Published(
            "up to 1.38x, the best of the three",
            NOT_FOUND,
            "machine translation, greedy; hardware not found",
            "2305.10427, abstract",
        ),
        differs="The task is the repair of code; there are no translation models here.",
        **REPAIR_MODEL,
    ),
    System(
        key="jacobi-pgj",
        name="Parallel Gauss-Seidel-Jacobi (PGJ)",
        paper="2305.10427",
        command="leapahead generate -m build/repair/model -d jacobi -o variant=pgj -o block=5",
        rule=EXACT,
        published=Published(
            "up to 1.38x, the best of the three",
            NOT_FOUND,
            "machine translation, greedy; hardware not found",
            "2305.10427, abstract",
        ),
        differs="As PJ.",
        **REPAIR_MODEL,
    ),
    System(
        key="jacobi-hgj",
        name="Hybrid Gauss-Seidel-Jacobi (HGJ)",
        paper="2305.10427",
        command="leapahead generate -m build/repair/model -d jacobi -o variant=hgj -o block=5",
        rule=EXACT,
        published=Published(
            "up to 1.38x", NOT_FOUND, "machine translation, greedy; hardware not found", "2305.10427, abstract"
        ),
        differs="As PJ. Where guessing ends is the length of the input by default.",
        **REPAIR_MODEL,
    ),
    System(
        key="cllm",
        name="Consistency LLM (CLLM)",
        paper="2403.00835",
        command="leapahead generate -m build/distilled/cllm/tuned -d jacobi -o block=8",
        rule=EXACT,
        published=Published("2.5x", "2.7", "a 7B model of code, HumanEval, A100", "2512.14681, where it is compared"),
        differs="Exact with respect to the tuned model. The initial state of training is what the drafter `jacobi` "
        "starts from.",
        needs="the model, tuned for Jacobi decoding",
        before="make train-cllm",
    ),
    System(
        key="lookahead",
        name="Lookahead decoding (15, 5, 15)",
        paper="2402.02057",
        command="leapahead generate -d lookahead --preset 7b",
        rule=EXACT,
        published=Published("1.88x", "2.05", "LLaMA-2-7B-chat, MT-Bench, A100, FlashAttention", "2402.02057, table 3"),
        differs="The bonus token after a whole n-gram is kept; window and n-grams are one tree; a sampled text is "
        "that of its seed.",
    ),
    System(
        key="lookahead-7",
        name="Lookahead decoding (7, 5, 7)",
        paper="2402.02057",
        command="leapahead generate -d lookahead -W 7 -N 5 -G 7",
        rule=EXACT,
        published=Published("1.34x", "1.64", SPEC_BENCH, LEADERBOARD),
        differs="As above.",
    ),
    System(
        key="lookahead-devices",
        name="Lookahead parallelism",
        paper="2402.02057",
        command="leapahead generate -d lookahead --preset 7b --devices cpu,cpu",
        rule=EXACT,
        published=Published(
            "2.05x", NOT_FOUND, "LLaMA-2-7B-chat, MT-Bench, 8 A100, FlashAttention", "2402.02057, figure 7"
        ),
        differs="The trees of every drafter are divided, and accepted tokens are computed again instead of sent. Here "
        "two processes share the cores of one CPU, for plain decoding too, with which the row is compared.",
        needs="for speed, several devices",
    ),
    System(
        key="prompt-lookup",
        name="Prompt lookup decoding",
        paper="",
        command="leapahead generate -d prompt_lookup -o num_tokens=10 -o max_ngram=3",
        rule=EXACT,
        published=Published("1.66x", "1.75", SPEC_BENCH, LEADERBOARD),
        differs="The latest of several matches is drafted.",
    ),
    System(
        key="anpd",
        name="ANPD",
        paper="2404.08698",
        command="leapahead generate -d ngram -o longest=5 -o nodes=8",
        rule=EXACT,
        published=Published("up to 3.67x", NOT_FOUND, "hardware not found", "2404.08698, abstract"),
        differs="Continuations of all n-gram lengths make one tree instead of one chain.",
    ),
    System(
        key="rest",
        name="REST",
        paper="2311.08252",
        command="leapahead generate -d datastore -o file=build/systems/rest.datastore -o nodes=64",
        rule=EXACT,
        published=Published("1.48x", "1.82", SPEC_BENCH, LEADERBOARD),
        differs="Sampling is exact, which the published program's is not. The corpus here is 12 MB "
        "instead of 12 to 27 GB, and the bundled model was trained on half of it.",
        needs="a corpus of texts like those that are decoded",
        before="leapahead datastore build src ../shared/data/gsm8k_train.jsonl --field answer "
        "-o build/systems/rest.datastore",
        made_here=True,
    ),
    System(
        key="recycling",
        name="Token Recycling",
        paper="2408.08696",
        command="leapahead generate -d recycling -o longest=1 -o k=8 -o nodes=80",
        rule=EXACT,
        published=Published("2.22x", "2.73", SPEC_BENCH, LEADERBOARD),
        differs="The tree is not a fixed template: the 80 nodes are the likeliest by what was accepted before. The "
        "prompt's own top-k fill the table.",
    ),
    System(
        key="sam",
        name="SAM decoding, alone",
        paper="2411.10666",
        command="leapahead generate -d suffix -o nodes=40",
        rule=EXACT,
        published=Published("1.84x", "2.30", "Vicuna-7B, Spec-Bench, A6000", "2411.10666, the program's page"),
        differs="Continuations of several occurrences make a tree; a static corpus is the drafter `datastore`.",
    ),
    System(
        key="sam-recycling",
        name="SAM decoding with Token Recycling",
        paper="2411.10666",
        command="leapahead generate -d auto -o sources=suffix,recycling -o nodes=64",
        rule=EXACT,
        published=Published("2.27x", "3.03", "Vicuna-7B, Spec-Bench, A6000", "2411.10666, the program's page"),
        differs="Both make one tree in every step, divided by estimated acceptance, instead of one or the other by the "
        "length of the match.",
    ),
    System(
        key="suffix-decoding",
        name="SuffixDecoding",
        paper="2411.04975",
        command="leapahead generate -d suffix -o nodes=0",
        rule=EXACT,
        published=Published(
            "up to 5.3x", NOT_FOUND, "an agent that writes SQL; hardware not found", "2411.04975, abstract"
        ),
        differs="Suffix automata instead of trees of bounded depth; the number of nodes follows from the measured cost "
        "of a forward. Texts of one run are kept, which the paper does with those of all requests.",
    ),
    System(
        key="auto",
        name="`auto`, this library's default, for comparison",
        paper="",
        command="leapahead generate",
        rule=EXACT,
        published=Published("", "", "", ""),
        differs="No published system.",
    ),
    System(
        key="ppd",
        name="Predictive pipelined decoding (PPD)",
        paper="2307.05908",
        command="python -m research devices",
        rule=EXACT,
        published=Published(NOT_FOUND, NOT_FOUND, "", ""),
        differs="Simulated only, from what is measured on one device.",
        needs="devices for each likely token of an early exit",
        elsewhere="simulated, see [several devices](several-devices.md)",
    ),
)
