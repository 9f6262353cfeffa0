"""What a person sees of a run: progress, tables, curves, samples."""
