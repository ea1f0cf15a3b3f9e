"""Programs on several devices of one process: what all kinds of devices have in common."""
