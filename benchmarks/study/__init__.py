"""The study: every method, variant and scenario on CIFAR-10, Tiny-ImageNet and ImageNet's own images."""
