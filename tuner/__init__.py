"""What would be better."""
