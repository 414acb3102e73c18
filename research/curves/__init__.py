"""The measurements behind the figures; each returns plain types, ready for JSON.

    cost          latency profile T(n) of a target           expected   tokens of one draft, by formula
    compression   S of lookahead against log2(W = G)         jacobi     convergence of Jacobi iteration
    pool          size and hits of lookahead's pool          match      accepted tokens by match length
    calibration   predicted against observed acceptance      growth     time and memory of text indexes
    sequoia       the best tree for a draft model

They are independent of files, plots and the command line.
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
