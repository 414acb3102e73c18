"""Targets: loaded models behind one interface (models.base), one package per engine."""
