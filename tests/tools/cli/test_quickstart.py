"""`trl-fsdp-qlora quickstart`: what it builds, and the command that trains it.

The run itself is `make quickstart`; tests/tools/recipes train with the same recipe.
"""

import os
import sys

from trl_fsdp_qlora.__main__ import main
from trl_fsdp_qlora.tools.cli import quickstart, scripts
from trl_fsdp_qlora.tools.small_base import character_tokenizer, new_model


def test_a_model_that_is_there_is_kept_and_trained(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokenizer = character_tokenizer()
    new_model(tokenizer, seed=0).save_pretrained("mine")
    tokenizer.save_pretrained("mine")
    written = os.stat("mine/model.safetensors").st_mtime_ns
    launches = []
    monkeypatch.setattr(quickstart, "launched", lambda *launch: launches.append(launch) or 0)
    monkeypatch.setattr(sys, "argv", ["trl-fsdp-qlora"])
    assert main(["quickstart", "--base", "mine", "--output_dir", "out", "--seed", "3"]) == 0
    ((command, words),) = launches
    options = dict(zip(words[::2], words[1::2], strict=True))
    assert os.stat("mine/model.safetensors").st_mtime_ns == written
    assert command == "grpo" and sys.argv[1:] == [command, *words]
    assert (options["--model_name_or_path"], options["--output_dir"], options["--seed"]) == ("mine", "out", "3")
    recipe = scripts.with_recipe(["--config", options["--config"]])[1]
    assert recipe.endswith("config_quickstart.yaml")
