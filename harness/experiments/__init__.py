"""Options in, a grid of runs out: executed, resumable. The only folder where the others meet."""
