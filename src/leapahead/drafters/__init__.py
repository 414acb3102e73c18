"""Drafters: they propose the tokens that the target verifies. `leapahead.drafters.names()` lists them."""

from __future__ import annotations

from leapahead.drafters.registry import BUILT_IN, load, make, names, options, ready

__all__ = ["BUILT_IN", "load", "make", "names", "options", "ready"]
