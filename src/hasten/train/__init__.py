"""Training of the learned parts: text of the model's own, and exit modules that learn from it."""
