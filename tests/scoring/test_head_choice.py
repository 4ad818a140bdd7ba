"""Which kernel scores, and that the one that was chosen is the one that runs."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from trl_fsdp_qlora import EfficientGRPOConfig
from trl_fsdp_qlora.prefix_sharing import PrefixSharing
from trl_fsdp_qlora.scoring import head_choice, logprobs
from trl_fsdp_qlora.scoring.head_choice import choose_head_kernel
from trl_fsdp_qlora.scoring.logprobs import score_positions

from .test_logprobs import problem


@pytest.mark.parametrize(
    ("choice", "device", "more", "kernel"),
    [
        ("auto", "cpu", {}, "frozen"),
        ("auto", "cuda", {}, "trl"),
        ("auto", "cuda", {"gathered": True}, "frozen"),
        ("auto", "cuda", {"triton": False}, "frozen"),
        ("auto", "cuda", {"dtype": torch.float64}, "frozen"),
        ("trl", "cpu", {}, "trl"),
        ("frozen", "cuda", {}, "frozen"),
        ("fused", "cuda", {}, "fused"),
        ("fused", "cuda", {"gathered": True}, "fused"),
        ("fused", "cpu", {}, "frozen"),
        ("fused", "cuda", {"triton": False}, "frozen"),
        ("fused", "cuda", {"dtype": torch.float64}, "frozen"),
        ("fused", "cuda", {"trained": True}, "trl"),
        ("frozen", "cpu", {"entropy_gradient": True}, "trl"),
    ],
)
def test_choice(choice, device, more, kernel):
    facts = {"dtype": torch.bfloat16, "triton": True, **more}
    taken = choose_head_kernel(choice, device, **facts)
    assert taken.kernel == kernel and taken.reason


def test_a_gpu_takes_what_was_measured_to_be_the_fastest(monkeypatch):
    monkeypatch.setattr(head_choice, "AUTO_ON_GPU", "fused")
    assert choose_head_kernel("auto", "cuda", torch.bfloat16, triton=True).kernel == "fused"
    assert choose_head_kernel("auto", "cuda", torch.bfloat16, triton=False).kernel == "frozen"


def test_the_named_kernel_scores(monkeypatch):
    """Both give the same values here, so what tells them apart is which one is called."""
    hidden, weight, _, targets, _ = problem(False)
    called = []
    for name in ("ChunkedLogProbFunction", "FrozenHeadLogProbFunction"):
        inner = getattr(logprobs, name)

        class Counted:
            @staticmethod
            def apply(*args, inner=inner, name=name):
                called.append(name)
                return inner.apply(*args)

        monkeypatch.setattr(logprobs, name, Counted)
    values = [score_positions(hidden, weight, None, targets, kernel=kernel)[0] for kernel in ("auto", "trl", "frozen")]
    assert called == ["FrozenHeadLogProbFunction", "ChunkedLogProbFunction", "FrozenHeadLogProbFunction"]
    torch.testing.assert_close(values[0], values[1], atol=1e-5, rtol=0)


def test_another_kernel_than_the_named_one_is_said_once(caplog):
    head_choice.say_once.cache_clear()
    hidden, weight, _, targets, _ = problem(False)
    for _ in range(2):
        score_positions(hidden, weight, None, targets, kernel="fused")
    (record,) = [record for record in caplog.records if "lm_head_kernel" in record.message]
    assert "'frozen' scores, Triton's kernels run on CUDA, the head is on cpu" in record.message


def test_the_config_names_the_kernel(tmp_path):
    with pytest.raises(ValueError, match="lm_head_kernel='fast' is unknown; it is one of auto, trl, frozen, fused"):
        EfficientGRPOConfig(output_dir=str(tmp_path), lm_head_kernel="fast", use_cpu=True)


def test_the_choice_reaches_the_scoring_head(monkeypatch):
    taken = []
    monkeypatch.setattr(logprobs, "score_positions", lambda *args: taken.append(args[-2:]) or (args[3] * 0.0,) * 2)
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    PrefixSharing(head_kernel="trl").prepare("policy", model)
    one = torch.tensor([0])
    model(input_ids=torch.zeros(1, 3, dtype=torch.long), score_index_N=one, score_targets_N=one)
    assert taken == [("trl", False)]
