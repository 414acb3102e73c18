"""Token trees, verification, sampling, stopping rules and counters. Uses numpy and the array API only."""
