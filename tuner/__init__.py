"""Searches for better configurations: capacity, tuning, placement, planning, sensitivity."""
