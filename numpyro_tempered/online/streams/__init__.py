"""What a long stream needs besides its rule."""
