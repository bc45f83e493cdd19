"""What every engine and every policy shares. Standard library and numpy only."""
