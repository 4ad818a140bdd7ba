"""What surrounds a run: checkpoints, telemetry, the start-up block, input checks, accelerate configs."""
