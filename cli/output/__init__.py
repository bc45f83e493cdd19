"""What is shown in the terminal: tables, progress, summaries."""
