"""Rows of systems in which a smaller model, or a part of the target, drafts."""

from __future__ import annotations

from typing import Any

from research.systems.system import DISTRIBUTION, EXACT, NOT_FOUND, RELAXED, REPAIR, Published, System

SIMULATED = "simulated, see [several devices](several-devices.md)"
DRAFT = "a draft model with the target's tokenizer"
TPU = "T5-XXL drafted by T5-small, WMT English-German, one TPU-v4"
SAMPLED = "Drafts are sampled; noise of tests and residuals is independent of the positions' noise."

SPEC_DRAFTER = (
    "leapahead generate -m build/repair/model -d draft_model --draft build/repair/drafter/draft -o nodes=8 -o depth=1 "
    "-o chain=true"
)
SPEC_DRAFTED: dict[str, Any] = {
    "paper": "2203.16487",
    "prompts": REPAIR,
    "needs": "an encoder-decoder model, and a drafter with mask tokens for it; here a small T5 that repairs code",
    "before": "make train-spec-drafter",
}

DRAFT_MODELS: tuple[System, ...] = (
    System(
        key="leviathan",
        name="Speculative decoding (Leviathan et al.)",
        paper="2211.17192",
        command="leapahead generate -d speculative_sampling --draft bundled -o depth=7",
        rule=DISTRIBUTION,
        published=Published("3.4x greedy, 2.6x at T = 1", NOT_FOUND, TPU, "2211.17192, table 2"),
        differs=SAMPLED,
        needs=DRAFT,
    ),
    System(
        key="chen",
        name="Speculative sampling (Chen et al.)",
        paper="2302.01318",
        command="leapahead generate -d speculative_sampling --draft bundled -o depth=4",
        rule=DISTRIBUTION,
        published=Published(
            "1.92x to 2.46x",
            NOT_FOUND,
            "Chinchilla 70B drafted by 4B, XSum and HumanEval, TPU v4",
            "2302.01318, table 1",
        ),
        differs=SAMPLED,
        needs=DRAFT,
    ),
    System(
        key="coupled",
        name="Drafter-invariant speculative decoding",
        paper="2408.07978",
        command="leapahead generate -d draft_model --draft bundled -o nodes=4 -o depth=4 -o chain=true",
        rule=EXACT,
        published=Published(NOT_FOUND, NOT_FOUND, "", ""),
        differs="The shared randomness is the Gumbel noise of seed, position and token, so that the text is that of "
        "plain decoding.",
        needs=DRAFT,
    ),
    System(
        key="specinfer",
        name="SpecInfer",
        paper="2305.09781",
        command="leapahead generate -d speculative_sampling --draft bundled -o rule=specinfer -o width=3 -o depth=4 "
        "-o nodes=16",
        rule=DISTRIBUTION,
        published=Published(
            "1.5x to 2.8x", NOT_FOUND, "over other serving systems, models divided over GPUs", "2305.09781, abstract"
        ),
        differs="One draft model, each of whose nodes has three draws, instead of several models tuned together.",
        needs=DRAFT,
    ),
    System(
        key="sequoia",
        name="Sequoia",
        paper="2402.12374",
        command="leapahead generate -d speculative_sampling --draft bundled -o rule=sequoia -o width=4 -o depth=5 "
        "-o nodes=32",
        rule=DISTRIBUTION,
        published=Published("up to 4.04x", NOT_FOUND, "Llama-2-7B, A100", "2402.12374, abstract"),
        differs="The tree grows by the draft model's probabilities in each step, not from a fixed shape. The dynamic "
        "programme for fixed shapes is in `research/sequoia_tree.py`.",
        needs=DRAFT,
    ),
    System(
        key="spectr",
        name="SpecTr",
        paper="2310.15141",
        command="leapahead generate -d speculative_sampling --draft bundled -o rule=spectr -o width=4 -o depth=4 "
        "-o nodes=16",
        rule=DISTRIBUTION,
        published=Published("2.13x", "4.0", "PaLM-2, 8 drafts of 8 tokens; hardware not found", "2310.15141, abstract"),
        differs="Draws branch at every node, instead of whole drafts beside each other.",
        needs=DRAFT,
    ),
    System(
        key="specdec",
        name="SpecDec",
        paper="2203.16487",
        command="leapahead generate -m build/repair/model -d auto -o nodes=16 --acceptance lossy-top-beta:beta=3,tau=1",
        rule=RELAXED,
        published=Published(
            "about 5x", NOT_FOUND, "machine translation and summaries; hardware not found", "2203.16487, abstract"
        ),
        differs="Its acceptance rule alone: the drafts are those of `auto`, not of its non-autoregressive drafter.",
        needs="an encoder-decoder model; here a small T5 that repairs code",
        before="python -m research repair",
        prompts=REPAIR,
    ),
    System(
        key="spec-drafter",
        name="SpecDec with its Spec-Drafter",
        command=f"{SPEC_DRAFTER} --acceptance lossy-top-beta:beta=3,tau=1",
        rule=RELAXED,
        published=Published(
            "about 5x", NOT_FOUND, "machine translation and summaries; hardware not found", "2203.16487, abstract"
        ),
        differs="Blocks of 8 tokens instead of 25. Masks see those before them, and the drafter's encoder begins as a "
        "copy of the target's.",
        **SPEC_DRAFTED,
    ),
    System(
        key="spec-drafter-exact",
        name="Spec-Drafter, exact",
        command=SPEC_DRAFTER,
        rule=EXACT,
        published=Published(NOT_FOUND, NOT_FOUND, "", ""),
        differs="As above, with exact matching, which the paper's rule is with beta = 1.",
        **SPEC_DRAFTED,
    ),
    System(
        key="bild",
        name="Big Little Decoder (BiLD)",
        paper="2302.07863",
        command="leapahead generate -d draft_model --draft bundled -o nodes=4 -o depth=4 -o chain=true -o unsure=0.6 "
        "--acceptance lossy-bild:rollback=2",
        rule=RELAXED,
        published=Published("up to 2.12x", NOT_FOUND, "machine translation and summaries, T4", "2302.07863, abstract"),
        differs="A draft has at most four tokens. Draft models are not aligned to the target's texts beforehand.",
        needs=DRAFT,
    ),
    System(
        key="draft-verify",
        name="Draft & Verify (self-speculative decoding)",
        paper="2309.08168",
        command="leapahead generate -d draft_model --draft self:skip=2-3 -o nodes=4 -o depth=4 -o chain=true",
        rule=EXACT,
        published=Published("up to 1.99x", NOT_FOUND, "LLaMA-2 models; hardware not found", "2309.08168, abstract"),
        differs="The layers are named here; `leapahead search-layers` finds them by Bayesian optimisation. Drafts have "
        "a fixed length with `nodes`, and end where they do not pay without it.",
    ),
    System(
        key="layer-skip",
        name="LayerSkip",
        paper="2404.16710",
        command="leapahead generate -d draft_model --draft self:first=3 -o nodes=4 -o depth=4 -o chain=true",
        rule=EXACT,
        published=Published(
            "up to 2.16x", NOT_FOUND, "Llama models, CNN/DM summaries; hardware not found", "2404.16710, abstract"
        ),
        differs="The bundled model was not trained with early exits. Layers and cache entries of the draft are reused.",
        needs="for speed, a checkpoint that was trained with early exits",
    ),
    System(
        key="distillspec",
        name="DistillSpec",
        paper="2310.08461",
        command="leapahead generate -d draft_model --draft build/distilled/draft/draft -o nodes=4 -o depth=4 "
        "-o chain=true",
        rule=EXACT,
        published=Published(
            "1.10x to 1.45x over speculative decoding",
            NOT_FOUND,
            "T5 models, four tasks; hardware not found",
            "2310.08461, abstract",
        ),
        differs="Verified by exact matching.",
        needs="a draft model that was distilled from the target",
        before="make train-draft",
    ),
    System(
        key="osd",
        name="Online speculative decoding (OSD)",
        paper="2310.07177",
        command="leapahead generate -d draft_model --draft bundled -o nodes=4 -o depth=4 -o chain=true -o learn=2",
        rule=EXACT,
        published=Published("up to 3.06x", NOT_FOUND, "hardware not found", "2310.07177, abstract of version 1"),
        differs="The draft model learns after every second text. Few texts are decoded here, in one round, so it "
        "hardly learns; the time of learning is part of the speed.",
        needs=DRAFT,
    ),
    System(
        key="cascade",
        name="Cascade speculative drafting, vertical",
        paper="2312.11462",
        command="leapahead generate -d cascade --draft bundled -o nodes=4 -o chain=true -o longest=1",
        rule=EXACT,
        published=Published(
            "1.81x over speculative decoding at most", NOT_FOUND, "hardware not found", "2312.11462, abstract"
        ),
        differs="The bigrams at the bottom are what the draft model chose before, instead of those of a corpus. "
        "Verified by exact matching.",
        needs=DRAFT,
    ),
    System(
        key="cascade-horizontal",
        name="Cascade speculative drafting, both cascades",
        paper="2312.11462",
        command="leapahead generate -d cascade --draft bundled -o lengths=3 -o nodes=8 -o chain=true -o longest=1",
        rule=EXACT,
        published=Published(
            "1.81x over speculative decoding at most", NOT_FOUND, "hardware not found", "2312.11462, abstract"
        ),
        differs="As above. There is one draft model; n-grams and recycled tokens draft the positions behind its own.",
        needs=DRAFT,
    ),
    System(
        key="ouroboros",
        name="Ouroboros",
        paper="2402.13720",
        command="leapahead generate -d ouroboros --draft bundled -o window=20 -o ngram=7 -o guesses=20 -o length=12 "
        "-o nodes=30 -o chain=true",
        rule=EXACT,
        published=Published("up to 3.9x", NOT_FOUND, "hardware not found", "2402.13720, abstract"),
        differs="Sampling is exact too. What the target chose along every path enters the pool, not only along the "
        "draft's tail.",
        needs=DRAFT,
    ),
    System(
        key="triforce",
        name="TriForce",
        paper="2404.11912",
        command="leapahead generate -d triforce --draft bundled -o budget=64 -o refresh=16 -o depth=6",
        rule=EXACT,
        published=Published("up to 2.31x", NOT_FOUND, "Llama-2-7B-128K, A100", "2404.11912, abstract"),
        differs="All levels match exactly. The texts here have some hundred tokens, where attention costs nothing; "
        "what it costs in long ones is told in [long contexts](long-contexts.md).",
        needs="for speed, long texts; a draft model with the target's tokenizer",
    ),
    System(
        key="pard",
        name="PARD",
        paper="2504.18583",
        command="leapahead generate -d draft_model --draft build/distilled/pard/draft -o nodes=8 -o chain=true",
        rule=EXACT,
        published=Published("3.67x", NOT_FOUND, "Llama-3.1-8B, vLLM", "2504.18583, abstract of version 4"),
        differs="Trees of eight depths from one draft forward, where `chain` is false.",
        needs="a draft model with mask tokens, for the target's tokenizer",
        before="make train-pard",
    ),
    System(
        key="pearl",
        name="Draft-target overlap (PEARL)",
        paper="2408.11850",
        command="python -m research devices",
        rule=EXACT,
        published=Published("up to 4.43x", NOT_FOUND, "hardware not found", "2408.11850, abstract"),
        differs="Simulated only, from what is measured on one device.",
        needs="a second device, or cores of its own for the draft model",
        elsewhere=SIMULATED,
    ),
)
