"""Tensors to kernels and back: the roads, and the graph around them."""
