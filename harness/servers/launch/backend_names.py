"""Names of backends that have a meaning of their own."""

SIMULATED = "simulated"  # runs no server
ATTACHED = "openai"  # servers that run already
TORCH = "torch"  # the torch engine
