"""The phases of a GRPO step on the clock, as a mixin in front of `trl.GRPOTrainer`."""

from peft.tuners.tuners_utils import BaseTunerLayer

from ..run.telemetry import PhaseClock, TelemetryCallback, token_counts, waste_metrics


class TimedPhases:
    """Seconds, peak bytes and waste of every phase as ordinary metrics, see [`trl_fsdp_qlora.run.telemetry`].

    Each method is TRL's own inside a phase of `self.clock`.
    """

    def _start_clock(self):
        self.clock = PhaseClock(self.accelerator.device)
        self._telemetry = TelemetryCallback(self.clock, lambda: self._metrics["train"])
        self.add_callback(self._telemetry)
        if self.use_vllm:
            self.vllm_generation.sync_weights = self.clock.timed("weight_sync", self.vllm_generation.sync_weights)

    def _log_waste(self, batch):
        counts = self.accelerator.reduce(token_counts(batch, self.num_generations), reduction="sum")
        self._telemetry.tokens += counts[-1].item()
        for name, value in waste_metrics(counts).items():
            self._metrics["train"][name].append(value)

    def training_step(self, model, inputs, num_items_in_batch):
        with self.clock.phase("forward_backward"):
            return super().training_step(model, inputs, num_items_in_batch)

    def _generate_and_score_completions(self, inputs):
        with self.clock.phase("prepare"):
            return super()._generate_and_score_completions(inputs)

    def _generate(self, prompts):
        with self.clock.phase("generate"):
            return super()._generate(prompts)

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        with self.clock.phase("reward"):
            return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)

    def evaluate(self, *args, **kwargs):
        with self.clock.phase("evaluate"):
            return super().evaluate(*args, **kwargs)

    def _pass_name(self, model) -> str:
        """`"reference"` or `"old_policy"`, of a pass without gradients."""
        # Not through `accelerator.unwrap_model`, which reads package metadata from the disk each time (some 3 ms).
        layer = next((module for module in model.modules() if isinstance(module, BaseTunerLayer)), None)
        off = layer is not None and (layer.disable_adapters or layer.active_adapters == ["ref"])
        return "reference" if off or model is self.ref_model else "old_policy"
