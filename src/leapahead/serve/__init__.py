"""The OpenAI-compatible server. It needs the extra `serve`; `leapahead serve` starts it."""
