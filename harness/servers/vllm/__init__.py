"""All that is known of vLLM: its kind, and the plugin inside it."""
