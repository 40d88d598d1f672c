"""Conjugate components of mixtures."""
