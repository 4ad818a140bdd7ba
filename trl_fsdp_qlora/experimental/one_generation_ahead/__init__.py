"""The next generation batch is drawn while this one is trained on: the field `rollouts_ahead`."""

from .ahead import RolloutsAhead, check_config

__all__ = ["RolloutsAhead", "check_config"]
