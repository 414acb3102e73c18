"""Any causal language model of Hugging Face Transformers as a target."""
