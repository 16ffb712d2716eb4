"""KernelPlans as Pallas functions. Imports jax, never torch."""
