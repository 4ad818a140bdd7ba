import copy
import io
import pickle

import pytest
import torch
from trl import GRPOConfig

from tests.tiny import config, lora, trainer
from trl_fsdp_qlora import AStarPOConfig, EfficientGRPOConfig, EfficientGRPOTrainer, TSPMOConfig

TOKEN, PASSWORD = "a-plain-token", "passw0rd"


@pytest.mark.parametrize("cls", [EfficientGRPOConfig, TSPMOConfig, AStarPOConfig])
def test_a_secret_stays_in_memory(cls, tmp_path):
    url, file = f"http://bob:{PASSWORD}@judge:8000", io.BytesIO()
    args = config(cls, tmp_path, hub_token=TOKEN, vllm_server_base_url=url, num_generations=4, max_steps=5)
    torch.save(args, file)
    for written in (str(args.to_dict()), args.to_json_string(), str(args.to_sanitized_dict()), str(file.getvalue())):
        assert TOKEN not in written and PASSWORD not in written and "judge" in written
    assert args.hub_token == TOKEN and TOKEN not in repr(args)
    loaded = pickle.loads(pickle.dumps(args))
    assert type(loaded) is cls and loaded.hub_token is None
    assert loaded.max_steps == 5 and loaded.learning_rate == args.learning_rate
    # A copy within the process is one: it can still push.
    for twin in (copy.copy(args), copy.deepcopy(args)):
        assert vars(twin).keys() == vars(args).keys()
        assert (twin.hub_token, twin.vllm_server_base_url) == (TOKEN, url)


def test_a_plain_config_of_trl_leaves_no_token_either(tmp_path):
    given = config(GRPOConfig, tmp_path, hub_token=TOKEN, save_strategy="steps", save_steps=1, max_steps=1)
    made = trainer(EfficientGRPOTrainer, lambda **_: given, tmp_path, peft_config=lora())
    assert made.args.hub_token == given.hub_token == TOKEN and type(given) is GRPOConfig
    made.train()
    assert TOKEN.encode() not in (tmp_path / "checkpoint-1" / "training_args.bin").read_bytes()
