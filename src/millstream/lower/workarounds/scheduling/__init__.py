"""Changes to how Inductor fuses and orders kernels."""
