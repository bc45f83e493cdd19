"""All that is known of SGLang: its kind, its build for CPU, and the plugin inside it."""
