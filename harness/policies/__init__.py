"""One file per system: what an instance decides. Imports `harness.core` only."""
