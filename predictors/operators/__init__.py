"""Step times put together from operators: kernel times of AIConfigurator's tables, for any model.

`layers` lists a model's operators, `kernels` gives their times on a GPU, `assembly` makes a
step-time model of them. Times of kernels come from ai-dynamo/aiconfigurator (095f58a, Apache-2.0;
see `tables/NOTICE`), packed by `scripts/pack_kernels.py`.
"""
