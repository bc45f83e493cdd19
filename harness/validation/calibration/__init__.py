"""Fits to recorded runs."""
