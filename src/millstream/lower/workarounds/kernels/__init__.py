"""Changes to how Inductor schedules kernels and writes them."""
