"""What autograd calls and keeps."""
