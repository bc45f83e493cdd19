"""A small real engine in torch: the iteration loop and the policies on a real model, paged KV.

A correct reference, not a fast engine (docs/torch-engine.md). Needs the extra `torch`.
"""
