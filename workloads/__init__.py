"""What arrives: requests, SLOs, arrival processes, lengths, sessions, traces."""
