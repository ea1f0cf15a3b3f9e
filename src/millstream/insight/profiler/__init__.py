"""What the device's profiler writes: read, joined with lines, told which kernels they are, its own cost taken out."""
