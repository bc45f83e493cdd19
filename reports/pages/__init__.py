"""Pages and tables: each kind of result as HTML, as text and as plain values."""
