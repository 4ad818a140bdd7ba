"""What a run writes about itself: the start-up block, seconds and bytes of its phases, the adapter's card."""
