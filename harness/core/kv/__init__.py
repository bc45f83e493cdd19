"""Counts blocks and bytes of KV cache and of adapters."""
