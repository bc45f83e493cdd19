"""Makes endpoints and takes them away; sends no load."""
