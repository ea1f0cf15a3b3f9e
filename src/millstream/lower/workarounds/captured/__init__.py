"""What is done with a graph as it was captured, before autograd makes it functional."""
