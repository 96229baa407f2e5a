"""The methods hasten ships: options, and how each is put together."""
