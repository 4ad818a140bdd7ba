"""One generation ahead in runs that are stopped, resumed and evaluated, and on two ranks."""

import json
import os
import signal
from itertools import pairwise

import pytest
import torch
from transformers import TrainerCallback

from tests import tiny
from tests.distributed.fsdp_on_gloo import fsdp_environment
from tests.distributed.launch import launch
from tests.trainers.vllm.runs import figures
from tests.trainers.vllm.sampling_server import SamplingServer
from tests.trainers.vllm.test_ahead import (  # noqa: F401 (a fixture, too)
    HALVES,
    adapter_by_step,
    assert_drawn_by,
    make,
    trained_prompts,
    wait_until,
    without_vllm,
)
from trl_fsdp_qlora import EfficientGRPOConfig, EfficientGRPOTrainer

SAVES = {"save_strategy": "steps", "save_steps": 1, "max_steps": 6, "optim": "adamw_torch", "rollouts_ahead": 1}


def weights_of(trainer) -> torch.Tensor:
    return torch.cat([value.detach().flatten() for value in trainer.model.parameters() if value.requires_grad])


class Stop(TrainerCallback):
    """Ends a run after a step, as an interrupt does."""

    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = state.global_step == self.step


@pytest.mark.parametrize("changes", [{}, HALVES, {"num_iterations": 2, **HALVES}], ids=["steps", "halves", "twice"])
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(tmp_path, changes):
    """Stopped at step 3: before a generation, or in the middle of one; the batch in flight is in the checkpoint."""
    settings = {**SAVES, "dataset": tiny.prompts(7), **changes}
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
    assert runs["stopped"][1] == runs["whole"][1]  # the log of a resumed run goes on from the checkpoint's
    assert runs["stopped"][2] == runs["whole"][2]  # nothing is drawn twice


@pytest.mark.parametrize("end", [3, 4], ids=["in an epoch", "at its end"])
def test_a_run_that_begins_its_epoch_anew_is_drawn_ahead(tmp_path, end):
    """With `ignore_data_skip`, of epochs of four steps: the prompts are those without the option, none drawn twice."""
    settings = {**SAVES, "dataset": tiny.prompts(8), "ignore_data_skip": True, "max_steps": 9}
    runs = {}
    for ahead in (0, 1):
        with SamplingServer() as server:
            trained = []
            for stop in (end, None):
                trainer = make(server, tmp_path / str(ahead), **{**settings, "rollouts_ahead": ahead})
                trained.append(trained_prompts(trainer))
                if stop is not None:
                    trainer.add_callback(Stop(stop))
                trainer.train(resume_from_checkpoint="auto")
            runs[ahead] = trained, len(server.draws)
    assert runs[1][0] == runs[0][0]
    # The batch in flight when the run stopped is for prompts that do not follow any more, but at an epoch's end.
    assert runs[1][1] == 9 + (end == 3)


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
    assert in_flight["step"] == 1 and len(in_flight["answer"]["completion_ids"]) == 8
    assert json.loads(in_flight["asked"])[0]["n"] == 4


def test_a_checkpoint_without_the_option_goes_on_with_it_and_the_other_way_round(tmp_path):
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


def test_an_evaluation_in_the_middle_waits_and_its_batch_keeps_its_place(tmp_path):
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
    words = ("tests/trainers/vllm/ahead_rank.py", server.url, out, json.dumps(changes))
    limits = {"timeout": 240, "grace": 20}
    outputs = launch(*words, processes=processes, check=check, meanwhile=meanwhile, environment=environment, **limits)
    written = [out / f"rank{rank}.json" for rank in range(processes)]
    if meanwhile is None:
        assert all(path.is_file() for path in written), "\n".join(text[-3000:] for _, text in outputs)
    return [json.loads(path.read_text()) for path in written if path.is_file()]


def test_two_ranks_train_on_the_same_prompts_in_the_same_order(tmp_path):
    """And their losses are those without the option while the policy does not change."""
    sizes = {"per_device_train_batch_size": 4, "learning_rate": 0.0, "max_steps": 5, "shuffle_dataset": True}
    runs, asked = {}, {}
    for ahead in (0, 1):
        with SamplingServer() as server:
            runs[ahead] = on_ranks(server, tmp_path / str(ahead), rollouts_ahead=ahead, **sizes)
            asked[ahead] = [draw.prompts for draw in server.draws]
    assert asked[1] == asked[0] and len(asked[0]) == 5
    for without, with_it in zip(runs[0], runs[1], strict=True):
        assert with_it["trained"] == without["trained"]
        torch.testing.assert_close(torch.tensor(with_it["loss"]), torch.tensor(without["loss"]), rtol=0, atol=1e-5)
    assert runs[1][0]["sampling/staleness"] == [0, 1, 1, 1, 1]


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


def test_a_reward_that_raises_on_one_rank_and_a_server_that_dies(tmp_path):
    """The launcher ends the other rank, and so the request; a dead server is an error on every rank."""
    sizes = {"per_device_train_batch_size": 4, "max_steps": 6, "rollouts_ahead": 1}
    with SamplingServer() as server:
        server.holds_from = 2
        broken = {"check": False, "meanwhile": lambda _: None}
        *_, failed = on_ranks(
            server, tmp_path / "a", reward_fails=2, **broken, **sizes
        )  # rank 0 may have an error, too
        assert failed["error"] == "RuntimeError: no reward today"
        wait_until(lambda: server.draws[-1].status != "running")
        assert len(server.draws) == 3 and server.draws[-1].status == "disconnected"
    with SamplingServer() as server:
        server.holds_from = 2

        def die(_):
            wait_until(lambda: len(server.draws) > 2, seconds=120)
            server.fails = True

        both = on_ranks(server, tmp_path / "b", check=False, meanwhile=die, **sizes)
        assert len(both) == 2 and all(
            f"RolloutError: the vLLM server at {server.url}" in rank["error"] for rank in both
        )


def test_a_killed_run_goes_on_from_its_checkpoint(tmp_path):
    settings = {**SAVES, "max_steps": 4}
    with SamplingServer() as server:
        (whole,) = on_ranks(server, tmp_path / "whole", processes=1, **settings)
    with SamplingServer() as server:
        server.holds_from = 3

        def kill(processes):
            wait_until(lambda: len(server.draws) > 3, seconds=120)  # the last batch is in flight
            os.kill(processes[0].pid, signal.SIGKILL)

        assert not on_ranks(server, tmp_path / "killed", processes=1, check=False, meanwhile=kill, **settings)
        wait_until(lambda: server.draws[-1].status != "running")
        assert server.draws[-1].status == "disconnected"
        server.holds_from = 100
        (resumed,) = on_ranks(server, tmp_path / "killed", processes=1, **settings)
    assert resumed["weights"] == whole["weights"] and resumed["loss"] == whole["loss"]


@pytest.mark.parametrize("saves", ["steps", "no"])
def test_sigterm_waits_for_what_is_in_flight_where_a_checkpoint_holds_it(tmp_path, saves):
    """Then the run goes on to the bit. Without checkpoints the request is ended."""
    settings = {**SAVES, "max_steps": 4, "save_steps": 100, "save_strategy": saves}
    with SamplingServer() as server:
        (whole,) = on_ranks(server, tmp_path / "whole", processes=1, **settings)
    with SamplingServer() as server:
        if saves == "no":
            server.holds_from = 2
        else:
            server.seconds = 1.0

        def stop(processes):
            wait_until(lambda: len(server.draws) > 2, seconds=120)  # the third batch is in flight
            os.kill(processes[0].pid, signal.SIGTERM)

        assert not on_ranks(server, tmp_path / "stopped", processes=1, check=False, meanwhile=stop, **settings)
        wait_until(lambda: server.draws[-1].status != "running")
        checkpoints = list((tmp_path / "stopped").glob("checkpoint-*"))
        if saves == "no":
            assert server.draws[-1].status == "disconnected" and not checkpoints
            return
        assert server.draws[-1].status == "answered" and len(server.draws) == 3
        assert [path.name for path in checkpoints] == ["checkpoint-2"]
        server.seconds = 0.0
        (resumed,) = on_ranks(server, tmp_path / "stopped", processes=1, **settings)
        assert len(server.draws) == 4  # nothing is drawn twice
    assert resumed["weights"] == whole["weights"] and resumed["loss"] == whole["loss"]


def test_a_second_ctrl_c_ends_the_request_at_once(tmp_path):
    with SamplingServer() as server:
        server.holds_from = 2

        def stop(processes):
            wait_until(lambda: len(server.draws) > 2, seconds=120)
            for _ in range(20):  # two within a second are one
                os.kill(processes[0].pid, signal.SIGINT)
                wait_until(lambda: server.draws[-1].status != "running", seconds=1.5)
                if server.draws[-1].status != "running":
                    break

        settings = {**SAVES, "max_steps": 4}
        (stopped,) = on_ranks(server, tmp_path, processes=1, check=False, meanwhile=stop, **settings)
        assert server.draws[-1].status == "disconnected"
    assert stopped["error"].startswith("KeyboardInterrupt: stopped at step 2 of 4")
