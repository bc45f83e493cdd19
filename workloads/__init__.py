"""Workloads: requests, SLOs, arrival processes, lengths, sessions, traces."""
