"""What the figures show: the numbers behind each curve, as plain types that become JSON.

    cost          T(n) of a target                       expected      tokens of one draft, by formula
    compression   S of lookahead against log2(W = G)     jacobi        who is right after k iterations
    pool          size and hits as the text grows        match         accepted tokens by match length
    calibration   predicted acceptance against observed    growth   seconds and bytes of an index
    sequoia       the tree for a draft model

Knows targets and drafters; neither files nor plots nor the command line.
"""

from leapahead.lab.curves.calibration import calibration
from leapahead.lab.curves.compression import compression
from leapahead.lab.curves.cost import cost
from leapahead.lab.curves.expected import expected
from leapahead.lab.curves.growth import growth
from leapahead.lab.curves.jacobi import jacobi
from leapahead.lab.curves.match import match
from leapahead.lab.curves.pool import pool
from leapahead.lab.curves.sequoia import sequoia

__all__ = ["calibration", "compression", "cost", "expected", "growth", "jacobi", "match", "pool", "sequoia"]
