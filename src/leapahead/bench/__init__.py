"""Benchmarks: drafters and peers against plain decoding, in one run, with their conditions."""
