"""Files for SGLang's CPU environment, copied into its site-packages; nothing here imports them."""
