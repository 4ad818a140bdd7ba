"""Features with an owner, a page each, and a rule by which they move out or go."""
