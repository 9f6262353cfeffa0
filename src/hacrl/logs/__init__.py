"""Where metrics go while a run trains: metrics.jsonl, TensorBoard, W&B, trackio, screen, warnings."""
