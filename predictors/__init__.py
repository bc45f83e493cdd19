"""What it will cost: hardware and model specs, step time, memory."""
