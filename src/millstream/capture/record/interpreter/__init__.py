"""What the interpreter does: instructions, reported one by one, and functions in C."""
