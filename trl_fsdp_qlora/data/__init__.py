"""Problems, their answers and their grading: files, the Hub, generators without end, preference pairs."""
