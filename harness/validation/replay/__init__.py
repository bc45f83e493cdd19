"""A recorded run, simulated again."""
