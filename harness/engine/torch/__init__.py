"""A small real engine in torch: the iteration loop and the policies on a real model, paged KV.

A reference that is right and not slow; docs/torch-engine.md says what it does and how. Needs the extra
`torch`.
"""
