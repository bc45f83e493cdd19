"""What is typed: declarations of options, and what they ask for."""
