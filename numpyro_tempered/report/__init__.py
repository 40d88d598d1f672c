"""Results as ArviZ data."""
