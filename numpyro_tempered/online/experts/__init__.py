"""Several rules side by side, weighted by their losses."""
