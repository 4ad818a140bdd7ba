"""The trainers of this package, one a line: what commands, recipes and pages have to know of each.

There are only names here, so an import costs nothing. A trainer's room has `config.py` and `trainer.py`. A line here
makes its command, which runs the script in `recipes/` with the room's name; the folders of its recipes begin with that
name. The public names of the classes are in the package's `__init__.py`.
"""

from typing import NamedTuple


class Method(NamedTuple):
    """A trainer of this package.

    Attributes:
        room: its room.
        title: its name in a text.
        prefix: of its classes, as in `EfficientGRPOTrainer` and `EfficientGRPOConfig`.
        does: what its command does, in the list of the commands.
        stock: prefix of TRL's classes with the same loss; empty if TRL has none.
        is_paired: whether it trains on pairs of answers, and generates nothing.
    """

    room: str
    title: str
    prefix: str
    does: str
    stock: str = ""
    is_paired: bool = False

    @property
    def command(self) -> str:
        return self.room.replace("_", "-")

    @property
    def config(self) -> str:
        return f"{self.prefix}Config"

    @property
    def trainer(self) -> str:
        return f"{self.prefix}Trainer"


METHODS = (
    Method("grpo", "GRPO", "EfficientGRPO", "train with GRPO: --config FILE.yaml and any field", stock="GRPO"),
    Method("t_spmo", "T-SPMO", "TSPMO", "train with T-SPMO, credit for single tokens"),
    Method("a_star_po", "A*-PO", "AStarPO", "train with A*-PO, one completion per prompt"),
    Method("rloo", "RLOO", "EfficientRLOO", "train with RLOO", stock="RLOO"),
    Method("dpo", "DPO", "EfficientDPO", "train with DPO, on preference pairs", stock="DPO", is_paired=True),
)
