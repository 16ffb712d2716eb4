"""The schedule IR and its passes. Imports neither torch, jax nor triton."""
