"""One line for a trainer of TRL's that this package has no class for."""
