"""What the fits and streams of the package compute, as records."""
