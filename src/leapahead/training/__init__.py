"""Training: of heads, of draft models, and of targets for Jacobi decoding.

    settings    what a training run is told, and its folder
    texts       the target's own texts, which it is trained on
    features    the target's hidden states of those texts
    batches     texts side by side, and which rows of them are trained
    losses      how far a prediction is from the target's
    attention   attention of drafted rows, which see their own ancestors only
    recipe      what the training of all kinds shares
    recipes     what Medusa and EAGLE predict and how they start; a kind's recipe and its configuration
    block_recipes  the same of Hydra, DFlash and DFlash 2
    loop        the optimization, the same for all kinds
    evaluate    how many tokens a trained head would save
    export      the files of a trained head
    card        its model card and its curves
    run         all of it in order

Whole models are trained by the same loop:

    student       the model that is trained, and its folder
    sequences     whole texts side by side
    draft_model   what a draft model learns: the target's distribution
    trajectories  the states that Jacobi decoding goes through
    cllm          what a tuned target learns: the text, from each of these states
    decoding      how many tokens a drafter saves, measured by decoding
    draft_run, cllm_run   all of it in order

The target is never changed by the training of what drafts, so whatever is proposed, the text stays the target's. A
tuned target is another model, and its texts are its own.
"""
