"""One engine over a grid of powers: a model with its data, fits of a guide, and chains of a kernel."""
