"""Read one run: tables, curves, samples."""
