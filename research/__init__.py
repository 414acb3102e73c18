"""Figures, measured priors, stand-in models and the recipe of the bundled model; not part of the wheel."""
