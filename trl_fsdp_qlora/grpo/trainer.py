"""`EfficientGRPOTrainer`: `trl.GRPOTrainer`'s interface, with another way of computing the same numbers."""

import torch
from trl import GRPOTrainer

from ..prefix_sharing import PrefixSharing
from ..trl_seams import split_pixel_values_by_grid, split_tensor_dict, unsplit_pixel_values_by_grid
from .config import EfficientGRPOConfig
from .groups import shuffle_groups


class EfficientGRPOTrainer(GRPOTrainer):
    """Drop-in replacement of [`trl.GRPOTrainer`]: same arguments, losses, metrics, checkpoints."""

    _tag_names = ["trl", "grpo", "trl-fsdp-qlora"]  # noqa: RUF012

    def __init__(self, model, reward_funcs=None, args: EfficientGRPOConfig | None = None, *positional, **kwargs):
        super().__init__(model, reward_funcs, args, *positional, **kwargs)
        self.prefix_sharing = PrefixSharing(
            getattr(self.args, "prefix_sharing", "auto"),
            temperature=self.temperature,
            cast_lm_head_to_fp32=self.args.cast_lm_head_to_fp32,
            autocast=self.accelerator.autocast,
        )
        self.prefix_sharing.prepare("policy", self.accelerator.unwrap_model(self.model))
        if self.ref_model is not None:
            self.prefix_sharing.prepare("reference", self.accelerator.unwrap_model(self.ref_model))

    def _prepare_inputs(self, generation_batch):
        # TRL's own method with one change: whole groups are shuffled, so the completions of a prompt stay together
        # when the generation batch is sliced into micro-batches.
        if not self.model.training:
            return super()._prepare_inputs(generation_batch)
        every = self.args.steps_per_generation * self.num_iterations
        if self._step % every == 0 or self._buffered_inputs is None:
            batch = split_pixel_values_by_grid(self._generate_and_score_completions(generation_batch))
            rank_offset = self.accelerator.process_index * len(batch["prompt_ids"])
            batch = shuffle_groups(batch, self.num_generations, rank_offset)
            slices = split_tensor_dict(batch, self.args.steps_per_generation)
            self._buffered_inputs = [unsplit_pixel_values_by_grid(slice_) for slice_ in slices]
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

    def _get_per_token_logps_and_entropies(
        self,
        model,
        input_ids,
        attention_mask,
        logits_to_keep,
        batch_size=None,
        compute_entropy=False,
        compute_aux_loss=False,
        pixel_values=None,
        image_grid_thw=None,
        num_images=None,
        pixel_attention_mask=None,
        spatial_shapes=None,
        num_tiles=None,
        image_sizes=None,
        token_type_ids=None,
        mm_token_type_ids=None,
        image_position_ids=None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        def stock():
            return super(EfficientGRPOTrainer, self)._get_per_token_logps_and_entropies(
                model,
                input_ids,
                attention_mask,
                logits_to_keep,
                batch_size,
                compute_entropy,
                compute_aux_loss,
                pixel_values,
                image_grid_thw,
                num_images,
                pixel_attention_mask,
                spatial_shapes,
                num_tiles,
                image_sizes,
                token_type_ids,
                mm_token_type_ids,
                image_position_ids,
            )

        if pixel_values is not None or token_type_ids is not None or mm_token_type_ids is not None:
            return stock()
        result = self.prefix_sharing.log_probs(
            "reference" if model is self.ref_model else "policy",
            model,
            input_ids,
            attention_mask,
            logits_to_keep,
            stock=stock,
            batch_size=batch_size,
            compute_entropy=compute_entropy,
            compute_aux_loss=compute_aux_loss,
        )
        metrics = self._metrics["train" if self.model.training else "eval"]
        for name, value in self.prefix_sharing.metrics.items():
            metrics[f"prefix_sharing/{'policy' if torch.is_grad_enabled() else 'no_grad'}/{name}"].append(value)
        return result
