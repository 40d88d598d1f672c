"""How far a fit may be from its posterior."""
