"""Effects of a step, recorded while it is traced: what it prints, logs, counts, calls and checks."""
