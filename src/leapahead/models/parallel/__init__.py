"""Several devices: the branches of a token tree divided over them, each with the whole model, or its weights.

    split     which nodes of a tree each device computes
    device    what one process does on its device: commands on the sessions of an ordinary target
    link      messages between the processes, by torch.distributed
    followed  the target of the process that decodes; it is the only one that drafts, verifies and commits
    target    such a target whose trees are divided, each device with the whole model
    tensor    such a target whose weights are divided, each device with a part of them
    launch    starts the other processes, or joins those that torchrun started
    process   the program of a process that was started
    worker    what the other processes do

Published as lookahead parallelism (Fu et al., 2402.02057, section 3.3) for the branches of lookahead decoding; here it
serves the trees of every drafter.
"""
