"""Which layers on which device: HELR, the exact optimum, and what they are compared with."""
