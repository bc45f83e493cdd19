"""Several instances: routing."""
