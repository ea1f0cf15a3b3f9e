"""Convolutions of small images: our kernel, what follows them, linear layers among them, and long sums split."""
