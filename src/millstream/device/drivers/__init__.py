"""The few things a context asks of PyTorch's device runtime, for the CPU and for CUDA."""
