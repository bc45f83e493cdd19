"""Where a request's time went."""
