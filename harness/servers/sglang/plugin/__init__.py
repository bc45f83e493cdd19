"""Our policies inside SGLang: imported by the server's processes, which have SGLang and torch."""
