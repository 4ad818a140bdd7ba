"""One generation ahead on two ranks with DeepSpeed and 4-bit shards, and on models with recurrent layers and images.

In each setting the prompts are those without the option, in the same order, and so are the losses, as long as the
policy does not change.
"""

import json
from functools import partial

import pytest
import torch
from datasets import Dataset
from PIL import Image
from transformers import AutoModelForCausalLM

from tests.distributed.fsdp_on_gloo import fsdp_environment
from tests.distributed.launch import accelerate_launch, launch
from tests.engines.vllm.runs import figures, grpo, on_server
from tests.engines.vllm.sampling_server import SamplingServer
from tests.fsdp2_qlora import tiny as qlora
from tests.tiny import these_first, tiny_vision_model

from .helpers import asked_prompts, trained_prompts

SIZES = {"max_steps": 4, "learning_rate": 0.0, "max_completion_length": 6}
GRANITE = {
    "family": "granitemoehybrid", "layer_types": ["mamba", "attention"], "mamba_n_heads": 4, "mamba_d_head": 32,
    "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_expand": 2, "num_local_experts": 0, "num_experts_per_tok": 0,
    "shared_intermediate_size": 64,
}  # fmt: skip


def assert_equal(runs: dict, asked: dict, least: int) -> None:
    """Runs without the option and with it: what each rank trained on, its losses, and what the server drew."""
    assert asked[1] == asked[0] and len(asked[0]) == least
    for without, with_it in zip(runs[0], runs[1], strict=True):
        assert with_it["trained"] == without["trained"]
        torch.testing.assert_close(torch.tensor(with_it["loss"]), torch.tensor(without["loss"]), rtol=0, atol=1e-5)
    assert any(runs[0][0]["loss"])
    assert runs[1][0]["sampling/staleness"] == [0, 1, 1, 1]


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", ["zero2", "zero3", "fsdp2 in 4 bits", "ddp in 4 bits"])
def test_on_two_ranks(tmp_path, way):
    if way.startswith("zero"):
        pytest.importorskip("deepspeed")
    base = qlora.make_checkpoint(tmp_path / "base", likes_digits=True)
    runs, asked = {}, {}
    for ahead in (0, 1):
        out = tmp_path / str(ahead)
        out.mkdir()
        changes = {**SIZES, "rollouts_ahead": ahead, "per_device_train_batch_size": 4, "checkpoint": base}
        changes["quantized"] = way.endswith("4 bits")
        served = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        with SamplingServer(served, eos=qlora.make_tokenizer().eos_token_id) as server:
            words = ("tests/experimental/one_generation_ahead/rank.py", server.url, str(out), json.dumps(changes))
            if way.startswith("zero"):
                run = accelerate_launch(f"{way}_cpu", *words, cwd=tmp_path, timeout=240)
                assert run.returncode == 0, run.stdout + run.stderr
            else:
                environment = fsdp_environment() if way.startswith("fsdp2") else None
                launch(*words, processes=2, environment=environment, timeout=240, grace=20)
            asked[ahead] = asked_prompts(server)
        runs[ahead] = [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(2)]
        assert all(run["sharded"] == (way in ("zero3", "fsdp2 in 4 bits")) for run in runs[ahead])
    assert_equal(runs, asked, 4)


def on_one_rank(tmp_path, new_model, tokenizer, dataset, eos: int, processor=None, **changes) -> None:
    runs, asked = {}, {}
    for ahead in (0, 1):
        with SamplingServer(new_model(), eos=eos, processor=processor) as server:
            settings = {**SIZES, **on_server(server.url), "rollouts_ahead": ahead, **changes}
            trainer = grpo(new_model(), tmp_path / str(ahead), dataset=dataset, tokenizer=tokenizer, **settings)
            trained = trained_prompts(trainer)
            trainer.train()
            # A prompt with an image is a request of its own, and the image is sent once.
            asked[ahead] = asked_prompts(server)
            assert server.events.count("render") == (0 if processor is None else len(server.draws))
        found = {name: figures(trainer, name) for name in ("loss", "sampling/staleness")}
        runs[ahead] = [{"trained": trained, **found}]
        # The server computes what the trainer does.
        assert max(figures(trainer, "sampling/sampling_logp_difference/mean")) < 1e-5
    assert_equal(runs, asked, 4)


@pytest.mark.parametrize(
    "shape", these_first([qlora.HYBRID, GRANITE], qlora.HYBRID), ids=lambda shape: shape["family"]
)
def test_recurrent_layers(tmp_path, shape):
    tokenizer = qlora.make_tokenizer()
    new_model = partial(qlora.make_model, likes_digits=True, **shape)
    on_one_rank(tmp_path, new_model, tokenizer, qlora.prompt_data(32), tokenizer.eos_token_id)


@pytest.mark.exhaustive
def test_images(tmp_path):
    _, processor = tiny_vision_model()
    prompts = [[{"role": "user", "content": f"{i}+1="}] for i in range(16)]
    pictures = [Image.new("RGB", (16, 16), (15 * i, 80, 120)) for i in range(16)]
    dataset = Dataset.from_dict({"prompt": prompts, "image": pictures})

    def new_model():
        """One that draws digits: an untrained one would also draw `<image>`, without a picture for it."""
        model, _ = tiny_vision_model()
        tokens = processor.tokenizer.convert_tokens_to_ids
        digits = tokens(list("0123456789"))
        weight = model.get_output_embeddings().weight
        with torch.no_grad():
            weight[digits] *= 8
            weight[tokens("<image>")] = weight[digits].mean(0)  # far below the likeliest digit's
        return model

    eos = processor.tokenizer.eos_token_id
    on_one_rank(tmp_path, new_model, processor, dataset, eos, processor, reward=digits_of)


def digits_of(completions, **_) -> list[float]:
    return [float(sum(int(c) for c in completion[-1]["content"] if c.isdigit())) for completion in completions]
