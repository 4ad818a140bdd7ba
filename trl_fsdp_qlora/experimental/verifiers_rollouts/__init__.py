"""A `rollout_func` and a reward made of an environment of the library `verifiers`."""

from .rollouts import VerifiersRollouts

__all__ = ["VerifiersRollouts"]
