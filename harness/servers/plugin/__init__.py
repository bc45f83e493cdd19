"""Policies inside vLLM and SGLang. Imports `core`, `policies` and this folder alone."""
