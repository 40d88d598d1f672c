"""Fitted mixtures from scikit-learn, and in NumPyro: as model, as guide, and as start of SVI."""
