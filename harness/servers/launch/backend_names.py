"""Names of backends that have a meaning of their own."""

SIMULATED = "simulated"  # runs no server
PAGED = "paged"  # the torch engine
