"""The choice of a model, of a power, and what they rest on."""
