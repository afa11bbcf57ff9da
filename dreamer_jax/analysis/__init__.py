"""What a trained model does inside: statistics of depth attention and experts, the paper's figures, a report."""
