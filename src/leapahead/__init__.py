"""leapahead: several tokens per forward pass, with exactly the text of one at a time."""
