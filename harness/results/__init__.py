"""The only code that writes or reads a run folder."""
