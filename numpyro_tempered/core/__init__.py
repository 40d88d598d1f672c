"""What every layer uses: arrays, checks, precision, batches."""
