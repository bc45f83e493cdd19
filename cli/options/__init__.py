"""Declarations of command-line options, and the settings that follow from them."""
