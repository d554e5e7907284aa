"""One stream over several processes."""
