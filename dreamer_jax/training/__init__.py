"""Training: state, one step, the loop around it, checkpoints, metrics."""
