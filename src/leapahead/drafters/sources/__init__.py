"""Sources: what knows candidates for the next tokens. See `leapahead.planner.source`."""
