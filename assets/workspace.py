"""Where everything lies: the store, the facts, the warehouse, the reports of one home directory, and the experiments it knows.

Built by ``definitions.py``, which alone reads the environment. Not here: what is done with them.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from assay.assets.registry import find_experiments, load_registries
from assay.schemas.experiment import Experiment
from assay.schemas.load import ExperimentError, Registries, load_experiment
from assay.warehouse.store import Store

if TYPE_CHECKING:
    from assay.warehouse.facts import FactStore


@dataclass(frozen=True)
class Workspace:
    """One home: ``store/`` (or a URL with ``store/`` as the cache before it), ``facts/``, ``warehouse.duckdb``, ``reports/``, ``training/``, ``dagster/``."""

    home: Path
    experiment_places: tuple[Path, ...]
    store_url: str | None = None
    facts_url: Path | None = None

    @cached_property
    def store(self) -> Store:
        return Store(self.store_url, cache=self.home / "store") if self.store_url else Store(self.home / "store")

    @cached_property
    def facts(self) -> "FactStore":
        from assay.warehouse.facts import FactStore  # polars: not needed to define assets

        return FactStore(self.facts_url or self.home / "facts")

    @property
    def warehouse(self) -> Path:
        return self.home / "warehouse.duckdb"

    @property
    def reports(self) -> Path:
        return self.home / "reports"

    @property
    def dagster_home(self) -> Path:
        return self.home / "dagster"

    @cached_property
    def registries(self) -> Registries:
        return load_registries()

    @cached_property
    def experiment_files(self) -> dict[str, Path]:
        return find_experiments(self.experiment_places)

    def experiment(self, name_or_file: str) -> Experiment:
        """The experiment of that name, or in that file.

        Raises:
            FileNotFoundError: there is none; says which there are.
            ExperimentError: the file cannot be an experiment.
        """
        file = Path(name_or_file)
        if file.suffix not in (".yaml", ".yml"):
            if name_or_file not in self.experiment_files:
                raise FileNotFoundError(
                    f"no experiment is named {name_or_file!r}; there are {', '.join(sorted(self.experiment_files)) or 'none'}, or give the path of a .yaml file"
                )
            file = self.experiment_files[name_or_file]
        elif not file.is_file():
            raise FileNotFoundError(f"there is no file {name_or_file}; `assay new NAME` writes one to start from")
        return load_experiment(file.resolve(), self.registries)

    def experiments(self) -> tuple[list[Experiment], list[ExperimentError]]:
        """Every experiment that can be read, and what is wrong with the others; two files of one experiment name are an error of the second."""
        good: dict[str, Experiment] = {}
        bad: list[ExperimentError] = []
        for file in self.experiment_files.values():
            try:
                experiment = load_experiment(file.resolve(), self.registries)
            except ExperimentError as error:
                bad.append(error)
                continue
            if experiment.name in good:
                from assay.schemas.yaml import Problem

                bad.append(
                    ExperimentError(
                        file, [Problem(("name",), f"{experiment.name!r} is the name of {good[experiment.name].file} too", "rename one")]
                    )
                )
                continue
            good[experiment.name] = experiment
        return list(good.values()), bad
