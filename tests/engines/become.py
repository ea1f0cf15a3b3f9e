"""Engines that take the place of those that were built, whose callers keep them."""


def become(engine, other):
    """Let an engine be another one from now on; return it."""
    engine.__class__, engine.__dict__ = type(other), other.__dict__
    return engine
