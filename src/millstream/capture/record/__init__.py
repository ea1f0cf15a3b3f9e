"""Record what Python code of a step reads and writes, instruction by instruction, while it is traced."""
