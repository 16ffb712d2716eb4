"""Passes from Program to KernelPlan, one a file, each a function from IR to IR."""
