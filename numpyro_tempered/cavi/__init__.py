"""Tempered coordinate ascent for mixtures, and its kin."""
