"""Planning: the cheapest GPUs, their number, parallelism and settings that carry a load."""
