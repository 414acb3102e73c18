"""Trained drafters: small networks that read the target's hidden states and predict several tokens ahead.

    config      what a head is; no torch
    formats     how a checkpoint says so, in every published format; no torch
    checkpoint  the files of a head: safetensors at run time, pickles only to convert them
    modules     the networks of Medusa, EAGLE, EAGLE-3 and P-EAGLE, with the names of the published weights
    hydra       the network of Hydra and Hydra++
    dflash      the network of DFlash and DSpark
    dflash2     the network of DFlash 2
    networks    which network a kind has
    head        a loaded head: what it needs, and how long its forwards take
    cache       the rows that a head keeps of its texts: keys and values of any number of layers
    mtp         MTP modules: those of a model's own checkpoint, and heads of speculators
    parallel_head  P-EAGLE: one forward gives the candidates of all depths, of rows like EAGLE's
    row_head    EAGLE: one row for every committed token and node, with a cache of its own
    block_head  Medusa: one forward gives the candidates of all depths
    hydra_head  Hydra: one row for every path of drafted tokens
    dflash_head DFlash: one forward of a block of mask tokens gives the candidates of all depths
    load        makes one of them of a checkpoint, beside its target

A head drafts only. Whatever it proposes, the text stays the target's.
"""
