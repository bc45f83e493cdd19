"""What happened to requests, as columns."""
