"""Training EAGLE-3 drafters: the target frozen, its own text, its own distribution."""
