"""Where metrics go while a run trains: metrics.jsonl, TensorBoard and W&B, the screen, warnings."""
