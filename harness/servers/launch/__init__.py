"""Installation and start of vLLM and SGLang servers."""
