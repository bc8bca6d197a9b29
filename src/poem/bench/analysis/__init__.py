"""From results to statements: numbers by place, the claims of the paper, the best learning rates."""
