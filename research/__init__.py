"""Figures of the documentation, measured priors, stand-in models and the recipe of the bundled model.

Not part of the wheel. Run it in a checkout: `python -m research COMMAND`, and `python -m research.train.tiny`.
"""
