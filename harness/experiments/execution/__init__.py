"""Plans runs and executes them in worker processes, here or on a Ray cluster."""
