"""Other ways to compute a graph's operators than the usual ones: which of them a program gets, it tries itself."""
