"""One module for each question: what its records answer. Read ``claims`` for an example."""
