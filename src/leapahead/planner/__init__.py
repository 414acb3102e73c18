"""How much to draft: what a forward of n rows costs, how likely a node is to be accepted, and which tree pays."""
