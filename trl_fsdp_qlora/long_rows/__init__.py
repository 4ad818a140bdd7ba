"""Long rows: MLPs, experts and norms a tile of tokens at a time, and once more in the backward."""
