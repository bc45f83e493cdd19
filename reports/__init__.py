"""What it shows: tables, figures, the HTML page."""
