"""All that is known of vLLM: its recipe, and the plugin inside it."""
