"""EAGLE-3: a small network that drafts token after token from the target's own states."""
