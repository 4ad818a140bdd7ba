"""What the trainers share: scoring, a step scored together, rollouts, the run around the loss, options."""
