"""What Inductor gets wrong of a graph that writes its inputs, after autograd: what is read too late."""
