"""Bounds and comparators of the theorems, and the ledger of a stream."""
