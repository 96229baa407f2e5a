"""Training the arbiter of ``cospec``: whose token to keep where draft and target disagree."""
