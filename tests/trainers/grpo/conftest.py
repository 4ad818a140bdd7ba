import pytest
from transformers import TrainingArguments


@pytest.fixture
def one_of_several_gpus(monkeypatch):
    """A process on a machine with several GPUs uses one, as a launched rank does; transformers would take all of
    them.
    """
    monkeypatch.setattr(TrainingArguments, "n_gpu", property(lambda args: 1))
