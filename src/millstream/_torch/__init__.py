"""Every private part of PyTorch that is touched, one function each, with the versions it was tried on."""
