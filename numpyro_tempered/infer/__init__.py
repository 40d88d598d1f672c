"""Inference for NumPyro models: SVI, Gaussian descent, and online runs."""
