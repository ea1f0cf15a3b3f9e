"""Changes to the graph of forward and backward, and to the passes that Inductor makes over it."""
