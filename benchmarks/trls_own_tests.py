"""A pytest plugin that runs TRL's own test files with this package in the trainers' place. TRL's wheel has no tests:

    git clone https://github.com/huggingface/trl ../trl
    export PYTHONPATH=$PWD/benchmarks
    python -m pytest -p trls_own_tests ../trl/tests/test_dpo_trainer.py                        # after share_prompts
    WITH=efficient python -m pytest -p trls_own_tests ../trl/tests/test_grpo_trainer.py        # EfficientGRPOTrainer
    python -m pytest ../trl/tests/test_dpo_trainer.py                                          # stock

`STEPS=1` ends every GRPO training of the tests after one optimizer step, for tests of what a step does. Tools and
environments, on both sides:

    export STEPS=1
    WITH=efficient python -m pytest -p trls_own_tests ../trl/tests/test_grpo_trainer.py -k "tool or environment"
    WITH=stock python -m pytest -p trls_own_tests ../trl/tests/test_grpo_trainer.py -k "tool or environment"

The tests fetch their tiny models and data from the Hub (`trl-internal-testing/...`), or from a folder of that name in
which pytest is started. The last lines have the number of passes that ran packed, and the reasons of the others.
"""

import collections
import functools
import os

import trl

import trl_fsdp_qlora
from trl_fsdp_qlora import share_prompts
from trl_fsdp_qlora.prefix_sharing.sharing import PromptSharing

SHARING = ("DPOTrainer", "KTOTrainer", "RLOOTrainer", "SFTTrainer", "RewardTrainer", "DistillationTrainer")
OURS = [f"{algorithm}{kind}" for algorithm in ("GRPO", "RLOO", "DPO") for kind in ("Config", "Trainer")]
counts: collections.Counter = collections.Counter()
reasons: collections.Counter = collections.Counter()


def pytest_configure(config):
    _count_passes()
    if "STEPS" in os.environ:
        _shorten_trainings(int(os.environ["STEPS"]))
    contestant = os.environ.get("WITH", "share_prompts")
    if contestant == "stock":
        return
    if contestant == "efficient":
        for name in OURS:
            setattr(trl, name, getattr(trl_fsdp_qlora, f"Efficient{name}"))
        return
    for name in SHARING:
        _share_prompts_of(getattr(trl, name))


def pytest_terminal_summary(terminalreporter):
    total = f"{counts['packed']} packed passes ({counts['tokens']:,} of {counts['padded_tokens']:,} padded tokens)"
    terminalreporter.write_line(f"{total}, {counts['padded']} as in stock TRL")
    for reason, times in reasons.most_common():
        terminalreporter.write_line(f"{times} times: {reason}")


def _shorten_trainings(steps: int) -> None:
    stock = trl.GRPOConfig.__post_init__

    @functools.wraps(stock)
    def post_init(self):
        stock(self)
        # Tests of missing `max_steps` expect an error, which a value would prevent.
        if "requires_max_steps" not in os.environ.get("PYTEST_CURRENT_TEST", ""):
            self.max_steps = min(self.max_steps, steps) if self.max_steps > 0 else steps

    trl.GRPOConfig.__post_init__ = post_init


def _share_prompts_of(trainer: type) -> None:
    stock = trainer.__init__

    @functools.wraps(stock)
    def init(self, *args, **kwargs):
        stock(self, *args, **kwargs)
        for model in (self.model, getattr(self, "ref_model", None), getattr(self, "teacher_model", None)):
            if model is not None:
                share_prompts(model)

    trainer.__init__ = init


def _count_passes() -> None:
    log = PromptSharing.fall_back

    def counted(score):
        @functools.wraps(score)
        def counting(self, *args):
            output = score(self, *args)
            if not self.is_closed:
                counts["packed" if self.figures.tokens else "padded"] += 1
                counts["tokens"] += self.figures.tokens
                counts["padded_tokens"] += self.figures.padded_tokens
            return output

        return counting

    def counted_reason(self, what, reason):
        reasons[f"{type(self.base).__name__}: {reason}"] += 1
        log(self, what, reason)

    PromptSharing.score = counted(PromptSharing.score)
    PromptSharing.run_planned = counted(PromptSharing.run_planned)
    PromptSharing.last_hidden_states = counted(PromptSharing.last_hidden_states)
    PromptSharing.fall_back = counted_reason
