"""What PyTorch does otherwise while a step is traced, each for the length of a context."""
