"""What an experiment may say, and which runs follow from it."""
