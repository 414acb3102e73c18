"""Measurements on a GPU, written cell by cell, so that a run that was interrupted goes on where it ended."""
