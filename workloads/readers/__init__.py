"""Readers of trace files, plain or gzip, for all known formats."""
