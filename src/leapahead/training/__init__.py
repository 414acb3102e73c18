"""Training of what drafts: heads (Medusa, EAGLE, EAGLE-3), and draft models, which are distilled.

    settings    what a training run is told, and its folder
    texts       the target's own texts, which it is trained on
    features    the target's hidden states of those texts
    batches     texts side by side, and which rows of them are trained
    losses      how far a prediction is from the target's
    attention   attention of drafted rows, which see their own ancestors only
    recipes     what each kind of head predicts and how it starts
    loop        the optimization, the same for all kinds
    evaluate    how many tokens a trained head would save
    export      the files of a trained head
    card        its model card and its curves
    run         all of it in order

    sequences   whole texts side by side, for models that are trained whole
    draft_model what a draft model learns: the target's distribution
    decoding    how many tokens a drafter saves, measured by decoding
    draft_run   all of a distillation in order

The target is never changed, so whatever is proposed, the text stays the target's.
"""
