"""What leaves the machine: the adapter's card."""
