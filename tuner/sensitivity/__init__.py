"""Whether a ranking of systems holds if the simulation is off."""
