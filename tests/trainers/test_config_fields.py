"""Fields of configs: one text serves the docstring and `--help`, and YAML's truth values are the words they were."""

import dataclasses

import pytest

from trl_fsdp_qlora.trainers.config_fields import default_of, documented, option, own_fields, spelled, type_name


@dataclasses.dataclass
class Stock:
    beta: float = 0.1
    steps: int = 5


@documented
@dataclasses.dataclass
class Ours(Stock):
    """A config."""

    STOCK = Stock

    switch: str = option("auto", "What it does.", choices=("auto", "on", "off"))
    names: list[str] = dataclasses.field(default_factory=list, metadata={"help": "Some names."})
    steps: int = option(7, "Again, with another default.")


@pytest.mark.parametrize(
    ("value", "words", "meant"),
    [
        (True, ("on", "off"), "on"),
        (False, ("auto", "off"), "off"),
        (True, ("yes", "no"), "yes"),
        (False, ("auto",), False),  # no word for it
        ("auto", ("on", "off"), "auto"),
        (0, ("on", "off"), 0),
    ],
)
def test_a_truth_value_becomes_the_word_that_yaml_has_read(value, words, meant):
    assert spelled(value, words) == meant and type(spelled(value, words)) is type(meant)


def test_a_classs_own_fields_are_those_that_it_defines():
    own = {item.name: item for item in own_fields(Ours)}
    assert list(own) == ["switch", "names", "steps"]
    assert [type_name(Ours, item) for item in own.values()] == ["str", "list[str]", "int"]
    assert [default_of(item) for item in own.values()] == ["auto", [], 7]
    assert own["switch"].metadata["choices"] == ["auto", "on", "off"]


def test_the_docstring_has_each_text_with_type_and_default():
    text = " ".join(Ours.__doc__.split())
    assert text.startswith("A config. Parameters: ")
    assert "switch (`str`, *optional*, defaults to `'auto'`): What it does." in text
    assert "steps (`int`, *optional*, defaults to `7`): Again, with another default." in text
    assert "beta" not in text
