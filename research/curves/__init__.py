"""What the figures show: the numbers behind each curve, as plain types that become JSON.

    cost          T(n) of a target                       expected      tokens of one draft, by formula
    compression   S of lookahead against log2(W = G)     jacobi        who is right after k iterations
    pool          size and hits as the text grows        match         accepted tokens by match length
    calibration   predicted acceptance against observed    growth   seconds and bytes of an index
    sequoia       the tree for a draft model

Knows targets and drafters; neither files nor plots nor the command line.
"""

from research.curves.calibration import calibration
from research.curves.compression import compression
from research.curves.cost import cost
from research.curves.expected import expected
from research.curves.growth import growth
from research.curves.jacobi import jacobi
from research.curves.match import match
from research.curves.pool import pool
from research.curves.sequoia import sequoia

__all__ = ["calibration", "compression", "cost", "expected", "growth", "jacobi", "match", "pool", "sequoia"]
