"""The earlier name of [`trl_fsdp_qlora.data.datasets`]."""

import warnings

from ..data.datasets import *  # noqa: F403  # what users imported from here

warnings.warn("trl_fsdp_qlora.recipe.datasets is trl_fsdp_qlora.data.datasets now", FutureWarning, stacklevel=2)
