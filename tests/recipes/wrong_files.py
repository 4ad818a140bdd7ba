"""The files that the cases of `wrong_inputs.py` name."""

import json
import shutil
from pathlib import Path

import pyarrow
import pyarrow.parquet
from datasets import Dataset, DatasetDict

from tests.tiny import lora, save_tiny_model, tiny_model
from trl_fsdp_qlora.recipe.small_base import character_tokenizer

ROWS = [{"problem": f"{a}+{b}=", "answer": a + b} for a in range(10) for b in range(10 - a)]
_YAML = {
    "good": "max_steps: 1\n",
    "unknown_key": "num_generation: 4\n",
    "bad_yaml": "max_steps: 1\ndataset: a: b\n",
    "list": "- dataset\n",
    "env": "env: [A]\n",
    "list_for_number": "learning_rate: [0.1]\n",
    "text_for_number": "max_steps: ten\n",
    "fraction": "max_steps: 1.5\n",
    "true_for_count": "held_out: true\n",
    "number_for_switch": "chat: 2\n",
    "list_for_name": "dataset: [a, b]\n",
    "choice": "dtype: float12\n",
    "reward": "rewards: exact\n",
    "no_rewards": "rewards: []\n",
    "no_model": "learning_rate: 1.0e-4\n",
}
_ONE = '{"problem": "1+1=", "answer": 2}'
_TEXT = {
    "data.txt": _ONE,
    "bad_line.jsonl": f'{_ONE}\n\n{{"problem": "1+1=" "answer": 2}}\n',
    "no_object.jsonl": f"{_ONE}\n[1, 2]\n",
    "missing.jsonl": f'{_ONE}\n{{"problem": "1+2="}}\n',
    "null.jsonl": f'{_ONE}\n{{"problem": "1+2=", "answer": null}}\n',
    "empty_question.jsonl": '{"problem": "", "answer": 1}\n',
    "number.jsonl": '{"problem": 5, "answer": 1}\n',
    "answer_list.jsonl": '{"problem": "5=", "answer": [5]}\n',
    "nan.jsonl": '{"problem": "5=", "answer": NaN}\n',
    "words.jsonl": f'{_ONE}\n{{"problem": "1+2=", "answer": "three"}}\n',
    "columns.jsonl": '{"a": 1, "b": 2}\n',
    "none.jsonl": "\n",
    "bad.json": "[\n{]",
    "two_lists.json": '{"train": [], "test": []}',
    "bad_row.json": f'{{"data": [{_ONE}, 5]}}',
    "null_in_data.json": f'{{"data": [{_ONE}, {{"problem": "1+2=", "answer": null}}]}}',
    "number.json": "3",
    "fields.csv": "problem,answer\n1+1=,2\n1+2=,3,4\n",
    "missing.csv": "problem,answer\n1+1=,2\n1+2=\n",
    "no.parquet": "no parquet",
}


def make_folder(folder: Path) -> Path:
    """Every file that a case names."""
    for name, text in _YAML.items():
        (folder / f"{name}.yaml").write_text(text)
    for name, text in _TEXT.items():
        (folder / name).write_text(text)
    (folder / "latin1.jsonl").write_bytes('{"problem": "é", "answer": 1}'.encode("latin-1"))
    for name in ("data.jsonl", "copy.jsonl"):
        (folder / name).write_text("\n".join(map(json.dumps, ROWS)))
    pyarrow.parquet.write_table(pyarrow.table({"problem": ["1=", "2="], "answer": [1, None]}), folder / "null.parquet")
    (folder / "parts").mkdir()
    (folder / "parts" / "train.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    DatasetDict({"train": Dataset.from_list(ROWS), "test": Dataset.from_list(ROWS[:3])}).save_to_disk(folder / "saved")
    (folder / "taken" / "checkpoint-5").mkdir(parents=True)
    (folder / "empty").mkdir()
    (folder / "parent").mkdir()
    save_tiny_model(folder / "base")
    save_tiny_model(folder / "parent" / "base")
    tiny_model().save_pretrained(folder / "no_tokenizer")
    save_tiny_model(folder / "no_template")
    (folder / "no_template" / "chat_template.jinja").unlink()
    shutil.copytree(folder / "base", folder / "broken")
    (folder / "broken" / "config.json").write_text("{")
    for name, base in (("adapter", "base"), ("no_base", None)):
        config = lora()
        config.base_model_name_or_path = base
        config.save_pretrained(folder / name)
    character_tokenizer().save_pretrained(folder / "adapter")
    return folder
