"""Weights of convolutions, made ready by a kernel of our own."""
