"""Changes to how Inductor writes kernels and calls them."""
