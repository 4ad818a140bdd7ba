"""Launches of worker.py: many scenarios share one, any of them can run alone, and one that fails fails alone."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch

from tests.distributed.launch import launch

WORKER = "tests/fsdp2_qlora/worker.py"


def chosen_by_name(config: pytest.Config) -> bool:
    """Whether single tests were asked for (`-k`, `file.py::test`): each scenario then is launched when it is needed."""
    return bool(config.option.keyword) or any("::" in argument for argument in config.args)


class Run:
    """The scenarios of one set of ranks; `run.rank(0)["kl"]` is what rank 0 found in the scenario labelled `kl`.

    Args:
        model: checkpoint.
        folder: made here; a scenario writes into its subfolder of that name.
        scenarios: `label: "name:option=value,..."`.
        alone: launch a scenario when it is asked for, instead of all of them when one is.
        needs: by label, results `(run, label)` whose files the scenario reads.
        more: for [`launch`].
    """

    def __init__(
        self,
        model: str | Path,
        folder: Path,
        scenarios: Mapping[str, str],
        alone: bool = False,
        needs: Mapping[str, Sequence[tuple["Run", str]]] | None = None,
        **more,
    ):
        folder.mkdir()
        self.model, self.folder, self.scenarios, self.alone = model, folder, dict(scenarios), alone
        self.more = {"timeout": 400, **more}  # of up to 20 trainings
        self.needs = dict(needs or {})
        self._found: dict[str, list | str] = {}  # by label: a result per rank, or how the scenario failed

    def rank(self, rank: int) -> Mapping[str, dict]:
        return _OfRank(self, rank)

    def result(self, label: str, rank: int) -> dict:
        if label not in self._found:
            self._launch([label] if self.alone else [name for name in self.scenarios if name not in self._found])
        found = self._found[label]
        if isinstance(found, str):
            pytest.fail(f"{label}={self.scenarios[label]}: {found}", pytrace=False)
        return found[rank]

    def _launch(self, labels: Sequence[str]) -> None:
        for label in labels:
            for run, needed in self.needs.get(label, ()):
                if run is not self or self.alone:
                    run.result(needed, 0)
        while labels:
            files = [self.folder / f"rank{rank}.pt" for rank in range(self.more.get("processes", 2))]
            for file in files:
                file.unlink(missing_ok=True)
            specifications = [f"{label}={self.scenarios[label]}" for label in labels]
            output = launch(WORKER, self.model, self.folder, *specifications, check=False, **self.more)
            results = [torch.load(file, weights_only=False) if file.is_file() else {} for file in files]
            done = [label for label in labels if all(label in result for result in results)]
            self._found |= {label: [result[label] for result in results] for label in done}
            left = [label for label in labels if label not in done]
            if left:  # it ended the launch; the others get one of their own
                texts = [f"--- rank {rank}, exit code {code} ---\n{text}" for rank, (code, text) in enumerate(output)]
                self._found[left[0]] = "failed\n" + "\n".join(texts)
            labels = left[1:]


class _OfRank(Mapping):
    def __init__(self, run: Run, rank: int):
        self.run, self.number = run, rank

    def __getitem__(self, label: str) -> dict:
        if label not in self.run.scenarios:
            raise KeyError(label)
        return self.run.result(label, self.number)

    def __iter__(self) -> Iterator[str]:
        return iter(self.run.scenarios)

    def __len__(self) -> int:
        return len(self.run.scenarios)
