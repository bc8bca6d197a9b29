"""Loading: decode image files, resize and crop them, corrupt them, and collate batches of tensors."""
