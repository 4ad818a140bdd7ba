"""Proof that completions came from the policy that is trained: the engine's log-probabilities against the trainer's.

vLLM returns the log-probability of every token it sampled, and training computes the policy's anyway. With e the engine's,
n the policy's and o those of the policy one sync before, all of the same tokens:

- the difference: mean |e − n| must lie in the band measured after the first sync (rounding, kernels);
- the version: e = n + s·(o − n) + noise, so s = Σ (e − n)(o − n) / Σ (o − n)² is 0 where the engine holds the new version, 1
  where it still holds the one before, and something else where it holds neither (an adapter scaled twice, none at all). Its
  standard error is σ / sqrt(Σ (o − n)²) with σ the root mean square of the noise; sums run on over syncs until it is small
  enough to tell 0 from 1.
"""

from contextlib import nullcontext
from dataclasses import dataclass, field

import torch

from .adapter_sync import RolloutError

# Mean |e − n| in nats that rounding alone explains at the first sync. Half precision: published mismatches between engines
# and trainers are 0.002 to 0.03; float32 here: 2e-5. A base that is not the trainer's differs by tenths.
START_LIMIT = {"half": 0.1, "float32": 0.005}
# Rounding grows with the logits as training sharpens the policy; a wrong version that stays inside is told by s.
BAND_FACTOR = 5.0
# s is judged when its standard error is below this: a stale version is then five of them away from a new one.
CONCLUSIVE = 0.1


class StaleRolloutError(RolloutError):
    """The engine answered with another policy than the one that is trained."""


@dataclass
class SyncProof:
    """Checks of each sync, on sums over all ranks, so that every rank comes to the same verdict.

    Args:
        half: whether engine or trainer computes in half precision.
    """

    half: bool
    band: float | None = None
    noise: float = 0.0
    _evidence: list[float] = field(default_factory=lambda: [0.0, 0.0])
    last: dict[str, float] = field(default_factory=dict)

    @staticmethod
    def batch_sums(sampled_BC: torch.Tensor, policy_BC: torch.Tensor, mask_BC: torch.Tensor) -> torch.Tensor:
        """This rank's `(4,)` sums in float64: tokens, Σ|e − n|, Σ(e − n)², and the largest |e − n| (reduce it by maximum).

        Args:
            sampled_BC: the engine's log-probabilities; NaN where it gave none.
            policy_BC: the trainer's.
            mask_BC: completion tokens that the engine sampled.
        """
        known_BC = mask_BC.bool() & ~sampled_BC.isnan()
        difference = torch.where(known_BC, sampled_BC - policy_BC.detach(), 0.0).double()
        return torch.stack(
            [known_BC.sum().double(), difference.abs().sum(), difference.square().sum(), difference.abs().amax()]
        )

    def judge_batch(self, tokens: float, absolute: float, squared: float, largest: float, version: int) -> None:
        """Judge summed [`batch_sums`]; the first call measures the band.

        Raises:
            StaleRolloutError: with both figures and what to look at.
        """
        if not tokens:
            return
        mean = absolute / tokens
        self.last = {"logp_difference/mean": mean, "logp_difference/max": largest}
        if self.band is None:
            limit = START_LIMIT["half" if self.half else "float32"]
            if not mean <= limit:
                raise StaleRolloutError(
                    f"after the first sync the engine's log-probabilities differ from the trainer's by {mean:.4g} nats "
                    f"on average, more than rounding explains ({limit:g}): the engine holds another base than the one "
                    "that is trained, or another adapter. Compare model_name_or_path with what the engine serves"
                )
            self.band, self.noise = mean, (squared / tokens) ** 0.5
            return
        limit = BAND_FACTOR * max(self.band, 1e-6)
        if not mean <= limit:
            raise StaleRolloutError(
                f"after sync {version} the engine's log-probabilities differ from the trainer's by {mean:.4g} nats on "
                f"average; after the first sync it was {self.band:.4g} (limit {limit:.4g}): the completions of this step "
                "came from another policy. No optimizer step was made on them; resume from the last checkpoint"
            )

    @staticmethod
    def version_sums(
        sampled_BC: torch.Tensor, new_BC: torch.Tensor, old_BC: torch.Tensor, mask_BC: torch.Tensor
    ) -> torch.Tensor:
        """This rank's `(2,)` sums in float64: Σ (e − n)(o − n) and Σ (o − n)². Shapes as in [`batch_sums`]."""
        known_BC = mask_BC.bool() & ~sampled_BC.isnan()
        step = torch.where(known_BC, old_BC - new_BC, 0.0).double()
        difference = torch.where(known_BC, sampled_BC - new_BC, 0.0).double()
        return torch.stack([(difference * step).sum(), step.square().sum()])

    def judge_version(self, product: float, squared: float, version: int) -> None:
        """Add summed [`version_sums`] and judge them, once the two versions differ by more than noise.

        Raises:
            StaleRolloutError: the engine's answers are nearer to the version before, or to neither.
        """
        self._evidence[0] += product
        self._evidence[1] += squared
        error = self.noise / self._evidence[1] ** 0.5 if self._evidence[1] else float("inf")
        if error > CONCLUSIVE:
            return
        staleness = self._evidence[0] / self._evidence[1]
        self._evidence = [0.0, 0.0]
        self.last |= {"staleness": staleness, "staleness_error": error}
        if abs(staleness) > 0.5:
            held = "the version before" if 0.5 < staleness < 1.5 else "neither the new version nor the one before"
            raise StaleRolloutError(
                f"after sync {version} the engine holds {held}: staleness {staleness:.2f} ± {error:.2f}, where 0 is the "
                "policy that is trained and 1 the one before. No optimizer step was made on its completions; resume from "
                "the last checkpoint"
            )


class AdapterSnapshot:
    """The trainable weights as they were at the last sync, on this rank, and a way to run a pass with them once more.

    Collective under ZeRO-3, where a parameter that is not gathered is empty.
    """

    def __init__(self, model: torch.nn.Module):
        trained = [p for p in model.parameters() if p.requires_grad]
        with _whole(trained):
            self.weights = [(p, p.detach().clone()) for p in trained]

    @torch.no_grad()
    def exchange(self) -> None:
        """Swap the kept weights with the current ones; calling it twice leaves everything as it was."""
        with _whole([parameter for parameter, _ in self.weights], changed=True):
            for parameter, kept in self.weights:
                current = parameter.detach().clone()
                parameter.copy_(kept)
                kept.copy_(current)


def _whole(parameters: list[torch.nn.Parameter], changed: bool = False):
    """Inside, what ZeRO-3 partitions is whole on every rank; with `changed` it is partitioned anew behind it."""
    if not any(hasattr(parameter, "ds_id") for parameter in parameters):  # ZeRO-3's mark
        return nullcontext()
    import deepspeed  # `zero` is one of its attributes, no module

    return deepspeed.zero.GatheredParameters(parameters, modifier_rank=0 if changed else None)
