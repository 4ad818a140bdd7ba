"""The earlier name of [`trl_fsdp_qlora.data.rewards`]."""

import warnings

from ..data.rewards import *  # noqa: F403  # what users imported from here

warnings.warn("trl_fsdp_qlora.recipe.rewards is trl_fsdp_qlora.data.rewards now", FutureWarning, stacklevel=2)
