"""Fields of all configs: plain values, YAML's words, and a config of TRL's completed without a change of its own."""

import numpy as np
import pytest
from trl import DPOConfig, GRPOConfig, RLOOConfig

from tests.tiny import config
from trl_fsdp_qlora import EfficientDPOConfig, EfficientGRPOConfig, EfficientRLOOConfig

PAIRS = [(GRPOConfig, EfficientGRPOConfig), (RLOOConfig, EfficientRLOOConfig)]


@pytest.mark.parametrize(("stock", "ours"), PAIRS)
def test_a_config_of_trls_is_completed_by_our_defaults(tmp_path, stock, ours):
    given = config(stock, tmp_path, beta=0.25, learning_rate=np.float64(1e-3))
    before = dict(vars(given))
    completed = ours.complete(given)
    assert type(given) is stock and vars(given) == before
    assert type(completed) is ours and (completed.beta, completed.prefix_sharing) == (0.25, "auto")
    assert type(completed.learning_rate) is float  # a numpy number could be saved, and not be read again
    assert ours.complete(completed) is completed and ours.complete(None) is None


def test_a_subclass_of_trls_config_keeps_its_class(tmp_path):
    class Users(GRPOConfig):
        def __post_init__(self):
            super().__post_init__()
            self.mine = 3

    completed = EfficientGRPOConfig.complete(config(Users, tmp_path))
    assert type(completed) is Users and (completed.mine, completed.tokens_per_pass) == (3, None)


@pytest.mark.parametrize(
    ("field", "value", "meant"),
    [
        ("prefix_sharing", False, "off"),
        ("mlp_tokens_per_tile", "off", "off"),
        ("mlp_tokens_per_tile", "512", "512"),
        ("phase_metrics", True, "on"),
        ("vllm_share_base", False, "off"),
    ],
)
def test_a_word_that_yaml_reads_as_a_truth_value(tmp_path, field, value, meant):
    made = config(EfficientGRPOConfig, tmp_path, **{field: value})
    assert str(getattr(made, field)) == meant


@pytest.mark.parametrize(
    ("field", "value"),
    [("lm_head_kernel", "fast"), ("rollout_sync", "all"), ("fsdp_gather", "never"), ("phase_metrics", "loud")],
)
def test_an_unknown_word_is_refused_with_the_known_ones(tmp_path, field, value):
    with pytest.raises(ValueError, match=f"{field}='{value}' is unknown; use one of '"):
        config(EfficientGRPOConfig, tmp_path, **{field: value})


def test_a_negative_number_of_tokens_is_refused_and_dpo_has_no_such_field(tmp_path):
    with pytest.raises(ValueError, match="tokens_per_pass=-1"):
        config(EfficientGRPOConfig, tmp_path, tokens_per_pass=-1)
    made = EfficientDPOConfig(str(tmp_path), use_cpu=True, bf16=False)
    assert isinstance(made, DPOConfig) and not hasattr(made, "tokens_per_pass")
