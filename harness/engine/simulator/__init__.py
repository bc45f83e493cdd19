"""The iteration loop under a virtual clock, with step times from a model."""
