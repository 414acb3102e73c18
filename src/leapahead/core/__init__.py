"""Token trees, verification, sampling, stopping rules and counters, on numpy and the Python array API alone."""
