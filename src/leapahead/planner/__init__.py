"""How much to draft: what a node costs on this machine, how likely it is, and the tree that pays (DESIGN section 8)."""
