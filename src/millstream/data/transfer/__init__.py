"""The ways of a batch to a device: to the CPU, to a GPU, to several."""
