"""The torch engine as a server."""
