"""What several systems decide by."""
