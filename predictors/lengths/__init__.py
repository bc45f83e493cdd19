"""Learnt predictors of answer lengths: training, evaluation, what is kept on disk, updates.

Needs the extra `torch` (torch, transformers, peft, safetensors, scikit-learn). What needs it is
imported when it is used, so that the modules here can be imported without.
"""
