"""Sweeps: many small programs through Millstream, each compared with eager PyTorch. No times are measured."""
