"""Measurements of ourselves: always against plain decoding in the same run, always with their conditions."""
