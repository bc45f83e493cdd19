"""Several instances under one clock: routing, transfers, failures and control steps."""
