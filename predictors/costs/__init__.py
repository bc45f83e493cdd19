"""What it costs to preempt: recomputing and swapping KV, learned from measurements."""
