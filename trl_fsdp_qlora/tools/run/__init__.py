"""What commands and scripts have in common: their words, their launch, and how they end."""
