"""Millstream: keep accelerators busy."""
