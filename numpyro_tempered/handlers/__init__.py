"""Tempering of NumPyro models, and what is known of a model from its trace."""
