"""One file per system: what an instance decides."""
