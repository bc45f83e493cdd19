"""Tables, figures and HTML pages of results."""
