"""From indices to batches of tensors."""
