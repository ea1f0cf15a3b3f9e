"""One pass over a source: what is done next, in which thread, and how it ends."""
