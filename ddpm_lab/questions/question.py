"""What a question declares of itself, so that it needs no entry anywhere else."""

from __future__ import annotations

from dataclasses import dataclass

from ddpm_lab.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A module with a ``QUESTION`` asks by the function of its own name and answers by ``answer``.

    ``file`` names its notebook, or its figures where it has none. ``trains`` says whether its configurations can be
    trained for their quality too, ``long`` whether it takes too long to be measured beside others, ``plan`` how a set
    is measured where that is not as the preset says, and ``asked`` whether ``ddpm-lab run`` measures it.
    """

    title: str
    file: str
    trains: bool = False
    long: bool = False
    plan: Plan | None = None
    asked: bool = True
