"""Engines that issue each launch from the host."""
