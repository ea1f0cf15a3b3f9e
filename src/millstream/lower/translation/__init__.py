"""TorchInductor's wrapper graph becomes a program."""
