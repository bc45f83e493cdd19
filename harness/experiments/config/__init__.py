"""Settings of an experiment, and the cells that follow from them."""
