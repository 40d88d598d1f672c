"""What a long stream needs beside its rule."""
