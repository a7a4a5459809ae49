"""A compact engine that serves real models on any machine with JAX, with the same cache contract as sgl-jax."""
