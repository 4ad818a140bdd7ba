"""`TSPMOTrainer`: GRPO's loop with credit for single token transitions (arXiv 2504.20834)."""

from dataclasses import replace

import torch

from ..grpo.trainer import EfficientGRPOTrainer
from ..starting.arguments import config_or_default
from ..step.rows import PerBatch
from .config import TSPMOConfig
from .credit import group_credit


class TSPMOTrainer(EfficientGRPOTrainer):
    """Token-Specific Prefix Matching Optimization, with the arguments of [`EfficientGRPOTrainer`].

    Over the distinct pairs U of a prefix p and a next token v among the completions of one prompt, it maximises

        1/|U| · Σ_U A(v|p) · π(v|p),    A(v|p) = mean{R : starts with p∘v} − mean{R : starts with p}.

    A is zero if completions do not part. So only branching tokens are scored, each distinct one once, and every
    completion is cut after its last credited token. The prompt and every prefix that completions share after it
    (`t_spmo/repeated_fraction`) are computed once, unless the model runs padded or on an attention implementation
    without masks.

    A completion's reward is the weighted sum of the reward functions, unscaled. Groups may span ranks: the trie covers
    the whole group. The definition follows the paper's abstract and is otherwise this project's reading.
    """

    _tag_names = ["trl", "t-spmo", "trl-fsdp-qlora"]  # noqa: RUF012 (a list, as in TRL)
    own_loss = True
    takes_rows = False  # its trie is one of completions
    _weighs_in_loss = True  # the objective has no ratio, so a pass for weights would be wasted

    method_on_card = "T-SPMO ([arXiv 2504.20834](https://arxiv.org/abs/2504.20834))"

    def __init__(self, model, reward_funcs=None, args=None, *positional, **kwargs):
        args = config_or_default(TSPMOConfig, args, model, "T-SPMO")
        super().__init__(model, reward_funcs, args, *positional, **kwargs)
        self._credited: PerBatch[torch.Tensor] = PerBatch()

    def features(self) -> list[tuple[str, str]]:
        # GRPO's lines on skipping and selection do not apply here.
        not_applicable = self.budget.features(self._terms(), self._why_every_token())
        features = [feature for feature in super().features() if feature not in not_applicable]
        tokens = "branching tokens only"
        if self.users_loss is not None:
            tokens = f"every token computed, which {self.users_loss} may read; branching tokens in the loss"
        features.append(("on", f"T-SPMO: {tokens}, objective {self.args.t_spmo_objective}"))
        return features

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        ids = batch["completion_ids"]
        mask = batch["completion_mask"]
        # A group may span ranks, so the completions of all ranks are gathered, in the order of the gathered rewards.
        ids_of_all = self._gathered(ids)
        masks_of_all = self._gathered(mask)
        credit_of_all, metrics = group_credit(ids_of_all, masks_of_all, self._weighted_rewards(), self._group_size)
        rows, columns = ids.shape
        first = self.accelerator.process_index * rows
        credit_BC = credit_of_all[first : first + rows, :columns]
        if "tool_mask" in batch:
            credit_BC = credit_BC * batch["tool_mask"]
        batch["advantages"] = credit_BC
        self._add_metrics({f"t_spmo/{name}": value for name, value in metrics.items()})
        return batch

    def _gathered(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows of all ranks, padded to the widest."""
        padded = self.accelerator.pad_across_processes(rows, dim=1)
        return self.accelerator.gather(padded)

    @property
    def _group_size(self) -> int:
        return self.num_generations if self.model.training else self.num_generations_eval

    def _scored_tokens(self, inputs, ahead=0):
        if self.users_loss is not None:
            return None
        credit_BC = inputs["advantages"]
        return self._credited.get([credit_BC], "credited", lambda: credit_BC != 0)

    def _compute_loss(self, model, inputs):
        credit_BC = inputs["advantages"]
        request = replace(self._request(model, inputs), scored_BC=self._scored_tokens(inputs))
        logps_BC, entropies_BC, aux_loss = self._score_completions(request)
        value_BC = logps_BC.exp() if self.args.t_spmo_objective == "probability" else logps_BC
        # The loss is the mean over the groups of the optimizer step: the credit contains 1/|U|, so the sum over a
        # group's rows is the group's objective.
        objective = (credit_BC * value_BC).sum()
        loss = -objective * self._group_size / len(credit_BC)
        if self.aux_loss_enabled:
            loss = loss + self.router_aux_loss_coef * aux_loss
        credited_BC = credit_BC != 0
        valid = inputs["completion_mask"].sum()
        entropy = (entropies_BC * credited_BC).sum()
        self._record_tokens(torch.stack([valid, credited_BC.sum(), entropy]).float().detach())
        return loss / (self.current_gradient_accumulation_steps if self.model.training else 1)

    def _record_tokens(self, sums: torch.Tensor) -> None:
        """Log figures over all ranks from this rank's valid tokens, credited tokens, and entropy of the latter."""
        # One wait for the device, where TRL's losses have ten: the metrics are there when the loss is.
        valid, scored, entropy = self.accelerator.reduce(sums, reduction="sum").tolist()
        figures = {
            "tokens/scored_fraction": scored / max(valid, 1.0),
            "tokens/nothing_to_learn": float(scored == 0),
            "entropy": entropy / scored if scored else float("nan"),
        }
        self._add_metrics(figures)
