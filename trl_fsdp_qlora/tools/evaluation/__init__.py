"""The quality of a model: accuracy on held-out problems, its uncertainty, pictures of runs."""
