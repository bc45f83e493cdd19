"""Measured profiles: one format, importers, step-time models made of tables, and fits."""
