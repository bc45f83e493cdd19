"""Our policies inside vLLM: imported by the server's processes, which have vLLM and torch."""
