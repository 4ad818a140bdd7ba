"""Small models, made from a seed on any machine, that reinforcement learning lifts in seconds."""
