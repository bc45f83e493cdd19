"""What carries cells out on real servers."""
