"""The command ``train``: its loop, its jobs, checkpoints, and several devices."""
