"""Runs measured on servers: one module for each way in which a server comes to be."""
