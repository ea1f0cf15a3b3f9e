"""Read what the device's profiler writes, join it with lines and kernels, and take out its own cost."""
