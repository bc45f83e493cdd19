"""Figures and the series behind them."""
