"""Terminal output: tables, progress and summaries."""
