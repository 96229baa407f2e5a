"""Training block drafters (DFlash, AdaFlash): the target frozen, its own text."""
