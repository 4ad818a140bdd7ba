"""One generation ahead in runs that are stopped, resumed and evaluated, and on two ranks."""

import json
import os
import signal
from itertools import pairwise

import pytest
import torch

from tests import tiny
from tests.distributed.fsdp_on_gloo import fsdp_environment
from tests.distributed.launch import launch
from tests.engines.vllm.runs import figures
from tests.engines.vllm.sampling_server import SamplingServer
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer

from .helpers import HALVES, SAVES, Stop, adapter_by_step, asked_prompts, assert_drawn_by, make, wait_until, weights_of


def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(tmp_path):
    """Stopped at step 3, in the middle of a generation; the batch in flight is in the checkpoint."""
    settings = {**SAVES, "dataset": tiny.prompts(7), "num_iterations": 2, **HALVES}
    runs = {}
    for name, ends in (("whole", ()), ("stopped", (3, None))):
        with SamplingServer() as server:
            for end in ends or (None,):
                trainer = make(server, tmp_path / name, **settings)
                if end is not None:
                    trainer.add_callback(Stop(end))
                torch.manual_seed(0 if end is not None or not ends else 99)
                trainer.train(resume_from_checkpoint="auto")
            losses = [figures(trainer, metric) for metric in ("loss", "grad_norm", "sampling/staleness")]
            runs[name] = weights_of(trainer), losses, [draw.prompts for draw in server.draws]
    torch.testing.assert_close(runs["stopped"][0], runs["whole"][0], rtol=0, atol=0)
    assert runs["stopped"][1] == runs["whole"][1]  # the log of a resumed run continues the checkpoint's
    assert runs["stopped"][2] == runs["whole"][2]  # nothing is drawn twice


def test_checkpoints_change_nothing_and_hold_what_is_in_flight(tmp_path):
    weights = []
    for saves in ("steps", "no"):
        with SamplingServer() as server:
            trainer = make(server, tmp_path / saves, **{**SAVES, "max_steps": 4, "save_strategy": saves})
            trainer.train()
            weights.append(weights_of(trainer))
    torch.testing.assert_close(*weights, rtol=0, atol=0)
    kept = torch.load(tmp_path / "steps/checkpoint-2/rollouts_0_of_1.pt", weights_only=True)
    in_flight = json.loads(kept["ahead"])
    assert in_flight["step"] == 1 and len(in_flight["generated"]["completion_ids"]) == 8


@pytest.mark.exhaustive
def test_a_checkpoint_continues_with_and_without_the_option(tmp_path):
    for before, after in ((0, 1), (1, 0)):
        with SamplingServer() as server:
            folder = tmp_path / str(before)
            settings = {**SAVES, **HALVES, "max_steps": 8}
            first = make(server, folder, **{**settings, "rollouts_ahead": before})
            first.add_callback(Stop(3))
            first.train()
            second = make(server, folder, **{**settings, "rollouts_ahead": after})
            buffered = json.dumps(figures(first, "loss"))
            second.train(resume_from_checkpoint="auto")
            assert second.state.global_step == 8 and json.dumps(figures(second, "loss")[:3]) == buffered
            since = len(figures(first, "sampling/staleness"))
            assert figures(second, "sampling/staleness")[since:] == ([0, 2] if after else [])


def test_an_evaluation_in_the_middle_keeps_the_batch_in_flight(tmp_path):
    """What is evaluated comes from the policy of now; the batch in flight is trained on as without evaluation."""
    runs = []
    for steps in (2, 100):
        evaluates = {
            "eval_strategy": "steps", "eval_steps": steps, "per_device_eval_batch_size": 8, "num_generations_eval": 2,
        }  # fmt: skip
        with SamplingServer(seconds=0.05) as server:
            torch.manual_seed(0)
            settings = {**server.settings(), **evaluates, "rollouts_ahead": 1, "max_steps": 4}
            trainer = EfficientGRPOTrainer(
                tiny.tiny_model(),
                tiny.digit_share,
                tiny.config(EfficientGRPOConfig, tmp_path / str(steps), **settings),
                tiny.prompts(),
                tiny.prompts(4),
                processing_class=tiny.character_tokenizer(),
                peft_config=tiny.lora(),
            )
            adapters = adapter_by_step(trainer)
            trainer.train()
            runs.append((weights_of(trainer), figures(trainer, "sampling/staleness")))
            assert all(before.ended <= after.began for before, after in pairwise(server.draws))
            for_training = [draw for draw in server.draws if draw.n == 4]
            for draw, step in zip(for_training, (0, 0, 1, 2), strict=True):
                assert_drawn_by(draw, adapters[step])
            evaluated = [draw for draw in server.draws if draw.n == 2]
            assert len(evaluated) == (2 if steps == 2 else 1)  # a run's last step is evaluated, too
            if steps == 2:
                assert_drawn_by(evaluated[0], adapters[2])
    torch.testing.assert_close(*(weights for weights, _ in runs))
    assert runs[0][1] == runs[1][1] == [0, 1, 1, 1]


def on_ranks(server, out, meanwhile=None, processes=2, check=True, environment=None, **changes):
    out.mkdir(exist_ok=True)
    words = ("tests/experimental/one_generation_ahead/rank.py", server.url, out, json.dumps(changes))
    limits = {"timeout": 240, "grace": 20}
    outputs = launch(*words, processes=processes, check=check, meanwhile=meanwhile, environment=environment, **limits)
    written = [out / f"rank{rank}.json" for rank in range(processes)]
    if meanwhile is None:
        assert all(path.is_file() for path in written), "\n".join(text[-3000:] for _, text in outputs)
    return [json.loads(path.read_text()) for path in written if path.is_file()]


# By where the prompts come from: the staleness of five batches. A stream's epoch has two batches of two prompts.
DATA = {"shuffled": ({"shuffle_dataset": True}, [0, 1, 1, 1, 1]), "streamed": ({"streamed": 5}, [0, 1, 0, 1, 0])}


@pytest.mark.exhaustive
@pytest.mark.parametrize("data", DATA)
def test_two_ranks_train_on_the_same_prompts_in_the_same_order(tmp_path, data):
    """And their losses are those without the option while the policy does not change."""
    changes, staleness = DATA[data]
    sizes = {"per_device_train_batch_size": 4, "learning_rate": 0.0, "max_steps": 5, **changes}
    runs, asked = {}, {}
    for ahead in (0, 1):
        with SamplingServer() as server:
            runs[ahead] = on_ranks(server, tmp_path / str(ahead), rollouts_ahead=ahead, **sizes)
            asked[ahead] = asked_prompts(server)
    assert asked[1] == asked[0] and len(asked[0]) == 5
    for without, with_it in zip(runs[0], runs[1], strict=True):
        assert with_it["trained"] == without["trained"]
        torch.testing.assert_close(torch.tensor(with_it["loss"]), torch.tensor(without["loss"]), rtol=0, atol=1e-5)
    assert runs[1][0]["sampling/staleness"] == staleness


@pytest.mark.exhaustive
def test_two_ranks_under_fsdp2_learn_what_they_learn_under_ddp(tmp_path):
    sizes = {"per_device_train_batch_size": 4, "max_steps": 4, "rollouts_ahead": 1}
    runs = []
    for environment in (None, fsdp_environment()):
        with SamplingServer() as server:
            out = tmp_path / str(len(runs))
            runs.append(on_ranks(server, out, environment=environment, **sizes)[0])
    assert [run["sharded"] for run in runs] == [False, True]
    assert runs[0]["sampling/staleness"] == runs[1]["sampling/staleness"] == [0, 1, 1, 1]
    torch.testing.assert_close(*(torch.tensor(run["weights"]) for run in runs), rtol=0, atol=1e-5)


def test_a_server_that_dies_is_an_error_on_every_rank(tmp_path):
    sizes = {"per_device_train_batch_size": 4, "max_steps": 6, "rollouts_ahead": 1}
    with SamplingServer() as server:
        server.holds_from = 2

        def die(_):
            wait_until(lambda: len(server.draws) > 2, seconds=120)
            server.fails = True

        both = on_ranks(server, tmp_path, check=False, meanwhile=die, **sizes)
        error = f"RolloutError: the vLLM server at {server.url}"
        assert len(both) == 2 and all(error in rank["error"] for rank in both)


@pytest.mark.exhaustive
def test_a_run_stopped_by_sigterm_continues_to_the_bit(tmp_path):
    settings = {**SAVES, "max_steps": 4, "save_steps": 100}
    with SamplingServer() as server:
        (whole,) = on_ranks(server, tmp_path / "whole", processes=1, **settings)
    with SamplingServer() as server:
        server.seconds = 1.0

        def stop(processes):
            wait_until(lambda: len(server.draws) > 2, seconds=120)  # the third batch is in flight
            os.kill(processes[0].pid, signal.SIGTERM)

        assert not on_ranks(server, tmp_path / "stopped", processes=1, check=False, meanwhile=stop, **settings)
        assert [path.name for path in (tmp_path / "stopped").glob("checkpoint-*")] == ["checkpoint-2"]
        assert server.draws[-1].status == "answered" and len(server.draws) == 3
        server.seconds = 0.0
        (resumed,) = on_ranks(server, tmp_path / "stopped", processes=1, **settings)
        assert len(server.draws) == 4  # nothing is drawn twice
    assert resumed["weights"] == whole["weights"] and resumed["loss"] == whole["loss"]
