"""What executes an instance: the simulator, and its plain reference."""
