"""Faster ways to run the same loop; the engine works without any of them."""
