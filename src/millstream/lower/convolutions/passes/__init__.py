"""What is done to convolutions in the graph of operators, before Inductor."""
