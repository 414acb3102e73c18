"""Draft models made of the target itself: skipped layers, early exit, int8 weights."""
