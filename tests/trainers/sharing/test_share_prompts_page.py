"""The examples of docs/share_prompts.md run as they stand, but for the model's size and the number of steps."""

import re
from pathlib import Path

import pytest

from tests.tiny import save_tiny_model
from trl_fsdp_qlora.prefix_sharing.sharing import PromptSharing

PAGE = Path(__file__).parents[3] / "docs" / "share_prompts.md"
SECTIONS = [section.partition("\n") for section in re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]]
CODE = {title: re.search(r"```python\n(.*?)```", text, re.DOTALL) for title, _, text in SECTIONS}
EXAMPLES = {title: block[1] for title, block in CODE.items() if block}


def test_there_are_five():
    assert list(EXAMPLES) == ["DPO", "RLOO", "KTO", "SFT", "A loop without a trainer"]


@pytest.mark.parametrize("title", ["DPO", "RLOO", "KTO", "SFT", "A loop without a trainer"])
def test_example(title, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = EXAMPLES[title].replace("Qwen/Qwen3-0.6B", save_tiny_model(tmp_path / "tiny"))
    code = code.replace("max_steps=20", "max_steps=2, use_cpu=True, bf16=False, report_to='none'")
    passes = []
    score = PromptSharing.score

    def counted(sharing, *call):
        passes.append(sharing)
        return score(sharing, *call)

    monkeypatch.setattr(PromptSharing, "score", counted)
    exec(compile(code, title, "exec"), {"__name__": "example"})
    assert passes and all(sharing.is_active for sharing in passes), passes[-1].describe()
    figures = passes[-1].figures
    assert 0 < figures.tokens < figures.padded_tokens
