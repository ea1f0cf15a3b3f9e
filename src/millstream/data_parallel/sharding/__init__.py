"""Optimizers divided between processes: what of each bucket is whose, its reduction, and the state of a share."""
