"""DFlash: a small network that drafts a whole block of tokens in one pass of its own."""
