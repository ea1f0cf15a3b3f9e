"""Traces kept on disk: a later process that would trace the same step again takes the graph instead."""
