"""How far a head's prediction q is from the target's distribution p, by name; each is a number for every row.

    ce           -log q(x)                   x the token of the text
    soft_ce      -sum p log q                the gradient is that of kl
    kl           sum p log(p / q)            forward Kullback-Leibler divergence
    reverse_kl   sum q log(q / p)
    jsd          1/2 kl(p, m) + 1/2 kl(q, m), with m = (p + q) / 2        Jensen-Shannon divergence
    tv           1/2 sum |p - q|             1 - the acceptance of speculative sampling
    smooth_l1    of hidden states, for EAGLE's features (2401.15077, equation 3)

The divergences are those of DistillSpec (2310.08461, section 3).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

# (logits of q [rows, vocabulary], logits of p [rows, vocabulary], tokens [rows]) -> [rows]
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def ce(logits: Tensor, target: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits, tokens, reduction="none")


def soft_ce(logits: Tensor, target: Tensor, tokens: Tensor) -> Tensor:
    return -(target.softmax(-1) * logits.log_softmax(-1)).sum(-1)


def kl(logits: Tensor, target: Tensor, tokens: Tensor) -> Tensor:
    p = target.log_softmax(-1)
    return (p.exp() * (p - logits.log_softmax(-1))).sum(-1)


def reverse_kl(logits: Tensor, target: Tensor, tokens: Tensor) -> Tensor:
    return kl(target, logits, tokens)


def jsd(logits: Tensor, target: Tensor, tokens: Tensor) -> Tensor:
    q, p = logits.log_softmax(-1), target.log_softmax(-1)
    middle = torch.logaddexp(p, q) - math.log(2)
    return 0.5 * (p.exp() * (p - middle) + q.exp() * (q - middle)).sum(-1)


def tv(logits: Tensor, target: Tensor, tokens: Tensor) -> Tensor:
    return 0.5 * (target.softmax(-1) - logits.softmax(-1)).abs().sum(-1)


def smooth_l1(states: Tensor, target: Tensor) -> Tensor:
    """Of hidden states [rows, hidden_size], the mean over their entries: [rows]."""
    return F.smooth_l1_loss(states, target, reduction="none").mean(-1)


LOSSES: dict[str, Loss] = {"ce": ce, "soft_ce": soft_ce, "kl": kl, "reverse_kl": reverse_kl, "jsd": jsd, "tv": tv}
