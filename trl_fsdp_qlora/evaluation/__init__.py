"""How good a model is: accuracy on held-out problems, its uncertainty, pictures of runs."""
