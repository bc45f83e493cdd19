"""Several instances under one clock."""
