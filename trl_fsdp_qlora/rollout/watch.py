"""`EngineWatch`: asks, after each sync and before an optimizer step, whether the engine samples from the policy."""

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator

from ..compat.trl import IMPORTANCE_RATIO, SAMPLED_LOGPS
from .correction import importance_weights
from .sync_proof import AdapterSnapshot, SyncProof

# Rows of the first micro-batch whose log-probabilities are taken once more, under the adapter of the sync before.
PROBE_ROWS = 2


class EngineWatch:
    """Proof of each sync ([`SyncProof`]), and the adapter of the sync before to compare with.

    Args:
        accelerator: of the trainer; its ranks decide together. Engine and trainer compute in half precision under its autocast
            and on devices.
        keeps_versions: keep the trainable weights of two syncs (an adapter; of a whole model it would be too much).
        draws: gives for the loss's inputs others to look at, where the run's completions are not drawn from the policy
            ([`trl_fsdp_qlora.rollout.reshaped.OwnDraws`]).
    """

    def __init__(self, accelerator: Accelerator, keeps_versions: bool, draws: Callable | None = None):
        self.accelerator = accelerator
        self.proof = SyncProof(half=accelerator.mixed_precision != "no" or accelerator.device.type != "cpu")
        self.keeps_versions = keeps_versions
        self.draws = draws
        self.version = 0
        self.due = False
        self._current: AdapterSnapshot | None = None
        self._previous: AdapterSnapshot | None = None

    def synced(self, model: torch.nn.Module) -> None:
        """Call after each sync, with the weights as they were sent."""
        self.version += 1
        self.due = True
        if self.keeps_versions:
            self._previous, self._current = self._current, AdapterSnapshot(model)

    @contextmanager
    def weights_before(self):
        """The policy has the weights of the sync before inside. Enter before a pass whose gradient is wanted."""
        self._previous.exchange()
        try:
            yield
        finally:
            self._previous.exchange()

    def begin(self, inputs: dict[str, Any], scored_BC: torch.Tensor | None, score: Callable) -> Callable | None:
        """Call it before a training pass, and the result with what that pass gave. Collective after a sync.

        Args:
            inputs: of the loss.
            scored_BC: tokens whose values the loss wants; the proof takes those.
            score: gives for a batch of rows, first of all, log-probabilities `(rows, C)`; called without gradient.

        Returns:
            [`judge`] of the policy's log-probabilities `(B, C)`; `None` where nothing is to be proven.

        Raises:
            StaleRolloutError: where the proof looks at completions of its own.
        """
        if not self.due or SAMPLED_LOGPS not in inputs:
            return None
        if self.draws is None:
            old_BC = self._probe(inputs, scored_BC, score, PROBE_ROWS)
            return lambda policy_BC: self.judge(inputs, policy_BC, scored_BC, old_BC)
        own = self.draws(inputs)
        with torch.no_grad():
            policy_BC = score(own)[0]
        figures = self.judge(own, policy_BC, None, self._probe(own, None, score, len(policy_BC)))
        return lambda _: figures

    def _probe(self, inputs: dict[str, Any], scored_BC: torch.Tensor | None, score: Callable, most: int):
        """Log-probabilities of the first rows under the adapter before, NaN in others; `None` where none is kept."""
        if self._previous is None:
            return None
        rows_B = torch.ones_like(inputs["completion_mask"][:, 0]) if scored_BC is None else scored_BC.any(1)
        rows = rows_B.nonzero()[:, 0].tolist()[:most] or [0]
        keys = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
        with self.weights_before(), torch.no_grad():
            values = score({key: inputs[key][rows] for key in keys})[0]
        old_BC = torch.full_like(inputs[SAMPLED_LOGPS], float("nan"))
        old_BC[rows] = values.to(old_BC.dtype)
        return old_BC

    def judge(
        self, inputs: dict[str, Any], policy_BC: torch.Tensor, scored_BC: torch.Tensor | None, old_BC
    ) -> dict[str, float]:
        """Compare the engine's values with the policy's; the figures are metrics. Collective.

        Raises:
            StaleRolloutError: on every rank; no optimizer step was made on the batch.
        """
        self.due = False
        mask_BC = sampled_mask(inputs) if scored_BC is None else sampled_mask(inputs) & scored_BC
        policy_BC = policy_BC.detach()
        sums = SyncProof.batch_sums(inputs[SAMPLED_LOGPS], policy_BC, mask_BC)
        everyone = self.accelerator.gather(sums.to(torch.float32 if sums.device.type == "mps" else sums.dtype)[None])
        tokens, absolute, squared, _ = everyone.sum(0).tolist()
        self.proof.judge_batch(tokens, absolute, squared, everyone[:, 3].max().item(), self.version)
        if old_BC is not None:
            known_BC = mask_BC & ~old_BC.isnan()
            sums = SyncProof.version_sums(inputs[SAMPLED_LOGPS], policy_BC, old_BC.nan_to_num(), known_BC)
            product, squared = self.accelerator.reduce(sums, reduction="sum").tolist()
            self.proof.judge_version(product, squared, self.version)
        return {f"rollout/{name}": value for name, value in self.proof.last.items()}


def sampled_mask(inputs: dict[str, Any]) -> torch.Tensor:
    """Tokens that the engine drew: those of the completion that no tool returned. Bool `(B, C)`."""
    mask_BC = inputs["completion_mask"].bool()
    return mask_BC & inputs["tool_mask"].bool() if "tool_mask" in inputs else mask_BC


def weighed(
    inputs: dict[str, Any], policy_BC: torch.Tensor, args: Any, accelerator: Accelerator
) -> tuple[dict[str, Any], dict[str, float]]:
    """The loss's inputs with the importance weights of the engine's tokens, and [`weight_metrics`]. Collective.

    Args:
        policy_BC: log-probabilities under the policy.
    """
    mask_BC = sampled_mask(inputs)
    weights = importance_weights(policy_BC, inputs[SAMPLED_LOGPS], mask_BC, args)
    return {**inputs, IMPORTANCE_RATIO: weights}, weight_metrics(weights, mask_BC, args, accelerator)


def weight_metrics(
    weights: torch.Tensor, mask_BC: torch.Tensor, args: Any, accelerator: Accelerator
) -> dict[str, float]:
    """TRL's figures of the importance weights, over all ranks, and the share of them that left their bounds. Collective.

    Args:
        weights: `(B, C)` or `(B, 1)`, truncated or masked.
        mask_BC: tokens that the engine drew.
        args: with `vllm_importance_sampling_clip_min` and `..._clip_max`.
    """
    flat = weights.flatten() if weights.size(1) == 1 and mask_BC.size(1) != 1 else weights[mask_BC]
    low, high = args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max
    outside = flat <= (0.0 if low is None else low)
    if high is not None:
        outside |= flat >= high
    sums = flat.new_tensor([float("inf"), 0.0, 0.0, float("-inf"), 0.0])
    if flat.numel():
        sums = torch.stack([flat.min(), flat.sum(), flat.new_tensor(flat.numel()), flat.max(), outside.sum().to(flat)])
    everyone = accelerator.gather(sums[None])
    count = everyone[:, 2].sum().item()
    if not count:
        return {}
    return {
        f"sampling/{IMPORTANCE_RATIO}/min": everyone[:, 0].min().item(),
        f"sampling/{IMPORTANCE_RATIO}/mean": everyone[:, 1].sum().item() / count,
        f"sampling/{IMPORTANCE_RATIO}/max": everyone[:, 3].max().item(),
        f"sampling/{IMPORTANCE_RATIO}/outside_share": everyone[:, 4].sum().item() / count,
    }
