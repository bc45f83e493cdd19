"""All that is known of SGLang: its recipe, its build for CPU, and the plugin inside it."""
