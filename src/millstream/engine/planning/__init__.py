"""Choose the plan that runs: measure kernels, propose, simulate and time candidates, remember the results."""
