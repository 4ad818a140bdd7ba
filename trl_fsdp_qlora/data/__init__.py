"""Problems, their answers and what grades them: files, the Hub, generators without end, preference pairs."""
