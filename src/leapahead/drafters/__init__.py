"""Drafters: what proposes the tokens that the target verifies."""

from __future__ import annotations

from leapahead.drafters.registry import BUILT_IN, factory, load, names, options, ready

__all__ = ["BUILT_IN", "factory", "load", "names", "options", "ready"]
