"""One posterior from data that stay on several machines."""
