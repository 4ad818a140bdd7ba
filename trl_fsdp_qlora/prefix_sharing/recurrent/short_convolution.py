"""Short convolutions (https://arxiv.org/abs/2511.23404): the state is the convolution's last inputs.

There is no recurrent state. The cache puts the last inputs before the new ones.
"""

from . import level_by_level

LAYERS = ("lfm2.Lfm2ShortConv", "lfm2_moe.Lfm2MoeShortConv", "lfm3.Lfm3ShortConv")
LAYER_TYPES = frozenset({"conv"})
compute = level_by_level.compute
