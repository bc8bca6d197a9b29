"""What runs a recipe: the model, its forward passes, the loop, its state and its accounting."""
