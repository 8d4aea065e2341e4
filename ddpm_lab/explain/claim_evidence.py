"""What the records of a machine say about published claims: rows of every question, and the faults of measuring."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from ddpm_lab.explain import faults, phrases
from ddpm_lab.explain.comparisons import Row, comparisons
from ddpm_lab.explain.frames import CLAIMS, Study
from ddpm_lab.explain.wrong_ways import Seen

_WHERE = {"multi_gpu": "notebook 02", "amp": "notebook 03", "workers": "notebook 04", "torch_compile": "notebook 05"}
_WHERE |= {"quality": "notebook 08", CLAIMS: "this notebook"}


class Evidence:
    """What the records of a machine say about claims."""

    def __init__(self, study: Study) -> None:
        self.study = study
        self.seen = Seen(study)
        self.faults = {f.key: f for f in faults.faults(study)}
        records = (*study.records, *study.beside)
        self.gpus = len(records[-1].machine.gpus) if records else 0
        self._studies = {
            name: dataclasses.replace(study, experiment=name, records=tuple(r for r in records if r.experiment == name))
            for name in {r.experiment for r in records}
        }

    @property
    def machine(self) -> str:
        """What GPUs there are, in words."""
        return f"this machine has {self.gpus or 'none'}"

    def study_of(self, row: Row) -> Study:
        """The study that a row comes from."""
        return self._studies[row["experiment"]]

    def rows(self, *experiments: str) -> list[Row]:
        """Candidates that have a speed, of each experiment in this order, each with its baseline's configuration."""
        found = []
        for name in experiments:
            if (of := self._studies.get(name)) is not None:
                rows = comparisons(of)
                base = {r["baseline_id"]: r["config"] for r in rows if r["role"] == "baseline"}
                shown = [r for r in rows if r["role"] == "candidate" and r["sets"] and not r["mechanism_only"]]
                found += [{**r, "base": base.get(r["baseline_id"], r["config"])} for r in shown]
        return found

    def first(self, wanted: Callable[[Row], bool], *experiments: str) -> Row | None:
        """The first such row that is wanted."""
        return next((row for row in self.rows(*experiments) if wanted(row)), None)


def said(row: Row | None) -> str:
    """A row in words: "bf16 0.74 (0.62 to 0.88) times as fast as fp32, 6 sets, notebook 03"; a dash without one."""
    if row is None:
        return phrases.DASH
    grown = row["batch"] != row["base"].global_batch_size
    base = f"batch {row['base'].global_batch_size}" if grown and row["ranks"] == 1 else row["baseline_label"]
    words = [
        f"{row['label']} {phrases.ratio_with_interval(row)} times as fast as {base}",
        phrases.plural(int(row["sets"]), "set"),
    ]
    words += ["weak scaling"] if grown and row["ranks"] > 1 else []
    return ", ".join([*words, _WHERE.get(row["experiment"], str(row["experiment"]))])
