"""From a call for which there is no graph to one that has run."""
