"""Trace files, plain or gzip."""
