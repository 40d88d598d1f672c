"""Did it work? Calibration of fits by simulation."""
