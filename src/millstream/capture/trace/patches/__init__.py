"""Patches of PyTorch while a step is traced, each for the length of a context."""
