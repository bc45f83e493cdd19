"""Speaks HTTP, knows no model."""
