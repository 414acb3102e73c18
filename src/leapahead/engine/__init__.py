"""The decoding loop and the scheduler of requests."""
