"""A copy of the trainer draws: what it writes reaches the trainer when it is taken, and not before."""

import pytest

from tests import tiny
from trl_fsdp_qlora import EfficientGRPOTrainer
from trl_fsdp_qlora.engines.vllm.adapter_sync import RolloutError
from trl_fsdp_qlora.experimental.one_generation_ahead.drawing import Drawing

from .helpers import make


class Counts(EfficientGRPOTrainer):
    draws = 0

    def _generate(self, prompts):
        self.draws += 1
        self._metrics["train"]["mine"].append(float(self.draws))
        return super()._generate(prompts)


@pytest.fixture
def trainer(server, tmp_path):
    made = make(server, tmp_path, cls=Counts, rollouts_ahead=1)
    made.vllm_generation.sync_weights()
    return made


def rows_of(trainer) -> list[dict]:
    """The rows of a generation batch: two prompts, four completions each."""
    return [trainer.train_dataset[place] for place in (0, 0, 0, 0, 1, 1, 1, 1)]


def test_a_users_class_draws_and_writes_on_the_copy(trainer):
    drawing = Drawing(trainer)
    metrics = {name: list(values) for name, values in trainer._metrics["train"].items()}
    drawer = drawing.drawer(rows_of(trainer), is_forgotten=lambda: False)
    drawn = drawing.draw(drawer, rows_of(trainer))
    assert trainer.draws == 0 and trainer._metrics["train"] == metrics
    _, after = drawn.attributes["draws"]
    assert len(drawn.generated.completion_ids) == 8 and after == 1
    (figures,) = drawn.figures
    assert figures.completion_ids == drawn.generated.completion_ids
    assert figures.completion_ids is not drawn.generated.completion_ids  # a subclass may change the list
    assert drawn.metrics["mine"] == [1.0]


def test_written_values_are_taken_unless_set_meanwhile(trainer):
    drawing = Drawing(trainer)
    drawn = drawing.draw(drawing.drawer(rows_of(trainer), is_forgotten=lambda: False), rows_of(trainer))
    drawing.take_metrics(drawn, logged=set())
    assert trainer._metrics["train"]["mine"] == [1.0]
    drawing.take_metrics(drawn, logged={"mine"})  # which TRL has logged over all ranks
    assert trainer._metrics["train"]["mine"] == [1.0]
    assert "draws" not in drawing.take_attributes(drawn) and trainer.draws == 1
    trainer.draws = 5
    assert "draws" in drawing.take_attributes(drawn) and trainer.draws == 5


def test_a_forgotten_batch_is_not_asked_for(trainer, server):
    drawing = Drawing(trainer)
    drawer = drawing.drawer(rows_of(trainer), is_forgotten=lambda: True)
    with pytest.raises(RolloutError):
        drawing.draw(drawer, rows_of(trainer))
    assert server.draws == []


def test_the_copys_tokenizer_model_and_figures_are_its_own(trainer):
    drawer = Drawing(trainer).drawer(rows_of(trainer), is_forgotten=lambda: False)
    assert drawer.processing_class is not trainer.processing_class
    assert drawer.accelerator.num_processes == 1 and drawer._metrics is not trainer._metrics
    trainer.model.eval()
    assert drawer.model.training and not trainer.model.training
    assert drawer.reward_funcs == trainer.reward_funcs == [tiny.digit_share]
