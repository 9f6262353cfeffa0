"""Files of a run: run directory, journal, pool, checkpoints. Imports no torch."""
