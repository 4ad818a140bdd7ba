"""A*-PO: the optimal value of each prompt once, then one completion per prompt (arXiv 2505.20686)."""
