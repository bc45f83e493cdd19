"""Several instances: arrivals, routing, one clock."""
