"""The ways of a batch to a device: to the CPU, and to a GPU."""
