"""Which plan runs: kernels are measured, candidates proposed, simulated and timed, and what was found is remembered."""
