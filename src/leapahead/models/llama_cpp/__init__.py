"""GGUF files as targets, under llama.cpp."""
