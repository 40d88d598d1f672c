"""Gaussian families, expected losses under them, and descent on their parameters."""
