"""One file a command: reads its options, calls the library, shows the answer."""
