"""Compares a simulation with recorded reality; the only folder above `experiments`."""
