"""Training of the heads that `leapahead.drafters.heads` drafts with.

    settings    what a training run is told, and its folder
    texts       the target's own texts, which it is trained on
    features    the target's hidden states of those texts
    batches     texts side by side, and which rows of them are trained
    losses      how far a prediction is from the target's
    attention   attention of drafted rows, which see their own ancestors only
    recipe      what the training of all kinds shares
    recipes     what Medusa and EAGLE predict and how they start; a kind's recipe and its configuration
    block_recipes  the same of Hydra and DFlash
    loop        the optimization, the same for all kinds
    evaluate    how many tokens a trained head would save
    export      the files of a trained head
    card        its model card and its curves
    run         all of it in order

Only the head is trained. The target is never changed, so whatever the head proposes, the text stays the target's.
"""
