"""Problems, answers, rewards and generators for recipes."""
