"""Runs policies under one clock; knows no paper by name."""
