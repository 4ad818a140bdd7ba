"""`EfficientGRPOTrainer`: `trl.GRPOTrainer`'s interface, with another way of computing the same numbers."""

from trl import GRPOTrainer

from ..trl_seams import split_pixel_values_by_grid, split_tensor_dict, unsplit_pixel_values_by_grid
from .config import EfficientGRPOConfig
from .groups import shuffle_groups


class EfficientGRPOTrainer(GRPOTrainer):
    """Drop-in replacement of [`trl.GRPOTrainer`]: same arguments, losses, metrics, checkpoints."""

    _tag_names = ["trl", "grpo", "trl-fsdp-qlora"]  # noqa: RUF012 (a list, as in TRL)

    def __init__(self, model, reward_funcs=None, args: EfficientGRPOConfig | None = None, *positional, **kwargs):
        super().__init__(model, reward_funcs, args, *positional, **kwargs)

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
