"""What a user's own script prints while training: TRL's log lines, with a few of this package's metrics among TRL's.

All metrics go where TRL sends them: to the trackers (`report_to`) and into `trainer_state.json`. TRL's
`log_completions` prints completions.
"""

from typing import Any

from transformers import PrinterCallback, ProgressCallback, Trainer

# Metrics that every run has in addition to stock TRL's, and those of them that a script prints. Metrics of an
# algorithm or an option that the user chose (`t_spmo/`, `dynamic_sampling/`, `v_star`) are printed like stock TRL's.
_EVERY_RUN = ("efficiency/", "generation/", "memory/", "prefix_sharing/", "throughput/", "time/", "tokens/")
PRINTED = {
    "efficiency/prompt_redundancy",
    "memory/forward_backward_peak_mib",
    "prefix_sharing/policy/tokens_fraction",
    "throughput/tokens_per_s",
    "time/forward_backward_s",
    "time/generate_s",
}


def printed_metrics(logs: dict[str, Any]) -> dict[str, Any]:
    """The part of `logs` that a script prints: all metrics of stock TRL, and [`PRINTED`]."""
    metrics = {name: name.removeprefix("eval_") for name in logs}
    return {k: logs[k] for k, metric in metrics.items() if metric in PRINTED or not metric.startswith(_EVERY_RUN)}


class _BriefPrinterCallback(PrinterCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        super().on_log(args, state, control, logs=printed_metrics(logs or {}), **kwargs)


class _BriefProgressCallback(ProgressCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        super().on_log(args, state, control, logs=printed_metrics(logs or {}), **kwargs)


def print_briefly(trainer: Trainer) -> None:
    """Replace transformers' own printing callback of a new `trainer` by one that prints [`printed_metrics`] only.

    The other callbacks get all metrics. The printing callback keeps its place among the callbacks, and
    `remove_callback(PrinterCallback)` still finds it.
    """
    brief = {PrinterCallback: _BriefPrinterCallback, ProgressCallback: _BriefProgressCallback}
    callbacks = trainer.callback_handler.callbacks
    callbacks[:] = [brief[type(callback)]() if type(callback) in brief else callback for callback in callbacks]
