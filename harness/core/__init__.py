"""What every engine and every policy shares: standard library and numpy only."""
