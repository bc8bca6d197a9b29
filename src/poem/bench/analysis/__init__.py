"""From results to numbers by group, row and column, the paper's claims, and the best learning rates."""
