"""Modes and switches of PyTorch's: of a thread, and of the process."""
