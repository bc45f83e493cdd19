"""The iteration loop of one instance, whatever executes its steps."""
