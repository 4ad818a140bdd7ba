"""What happens before the first step: arguments completed and checked, and the first step of an untested TRL."""
