"""HTTP out, timestamps back; knows nothing of how a server is started or stopped."""
