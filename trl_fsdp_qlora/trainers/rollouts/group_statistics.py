"""Statistics of the groups in a generation batch, logged as the metrics `groups/...`."""

import torch

from .dynamic_sampling import combine, groups_with_variance


class GroupStatistics:
    """Counts the completions drawn for a generation batch, and measures the variance of the groups trained on.

    Args:
        weights_K: weight of each reward function.
        normalizes_each: whether the functions are normalised one by one.

    Attributes:
        rewards_NK: rewards of the completions that were scored last, on all ranks.
    """

    def __init__(self, weights_K: torch.Tensor, normalizes_each: bool):
        self.weights_K = weights_K
        self.normalizes_each = normalizes_each
        self.drawn = 0
        self.rewards_NK: torch.Tensor | None = None

    def add(self, rewards_NK: torch.Tensor, drawn: int) -> torch.Tensor:
        """Record rewards, for which `drawn` completions were generated, and return them."""
        self.rewards_NK = rewards_NK
        self.drawn += drawn
        return rewards_NK

    def rewards_N(self) -> torch.Tensor:
        """The weighted sum of each completion's last rewards."""
        return combine(self.rewards_NK, self.weights_K)

    def metrics(self, group_size: int) -> dict[str, float]:
        """Metrics of the batch whose rewards came last. The call restarts the counts.

        `information` is 4 p (1 - p) per completion drawn for rewards of 0 and 1: the unbiased variance within the
        groups that are trained on, in units of a quarter of the squared range of the batch's rewards.
        """
        drawn = self.drawn
        self.drawn = 0
        varied_G = groups_with_variance(self.rewards_NK, self.weights_K, group_size, self.normalizes_each).cpu()
        rewards_GN = self.rewards_N().double().cpu().unflatten(0, (-1, group_size))
        finite_GN = rewards_GN.isfinite()
        count_G = finite_GN.sum(1)
        centred_GN = torch.where(finite_GN, rewards_GN - rewards_GN.nanmean(1, keepdim=True), 0.0)
        variance_G = centred_GN.square().sum(1) / (count_G - 1).clamp(min=1)
        finite_N = rewards_GN[finite_GN]
        extent = float(finite_N.max() - finite_N.min()) if len(finite_N) else 0.0
        information = 4 * float(variance_G[varied_G].sum()) * group_size / extent**2 if extent else 0.0
        trained = int(varied_G.sum()) * group_size
        metrics = {"groups/zero_variance_fraction": 1 - float(varied_G.double().mean())}
        if drawn:  # the command `compare` hands two trainers the same completions, which neither has drawn
            metrics["groups/information"] = information / drawn
            if trained:  # without a trained completion there is no ratio
                metrics["groups/drawn_per_trained"] = drawn / trained
        return metrics
