"""Placement: which layers of a model stand on which device of a topology."""
