"""Graphs that are cut at their collectives, and put together again as one program."""
