"""Orders waiting requests."""
