"""What is run: engines, policies, clusters, experiments."""
