"""Algorithms and parameters that several systems use."""
