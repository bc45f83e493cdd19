"""Accuracy: public measurements of real GPUs, predicted without looking at what was measured.

`readers` turn files into `Measurement`s, `predict` answers a `Case` (it never gets the measured
figures), `errors` compares the two and sums up.
"""
