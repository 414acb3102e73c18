"""The compiled module `leapahead._native`, where this installation has it.

Each of its classes does exactly what the Python code beside it does, only faster; whoever uses one asks here and falls
back on Python. It is missing where the package was installed without a compiler (see hatch_build.py).

Attributes:
    available: whether the module is there and fits this package.
"""

from __future__ import annotations

INTERFACE = 16  # of the module that fits; an editable installation may still have an older one

try:
    import leapahead._native as module

    available = module.INTERFACE == INTERFACE
except ImportError:
    available = False

__all__ = ["available", "module"]
