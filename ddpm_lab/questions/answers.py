"""From a study to its answer: each question's own, and for everything else a comparison of speeds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ddpm_lab.explain import figure_ratios, figure_waterfalls, gains, machine_state, sentences
from ddpm_lab.explain.answer import Answer, View, speeds
from ddpm_lab.explain.figure_batch_sizes import beside as batch_sizes_beside
from ddpm_lab.explain.findings import ANSWERED, Finding, about, compared, plain
from ddpm_lab.explain.frames import Study, once
from ddpm_lab.explain.questions import recommendation
from ddpm_lab.questions import (
    all_reduce,
    amp,
    batch_size,
    claims,
    exchange,
    multi_gpu,
    peers,
    profile,
    quality,
    torch_compile,
    workers,
)

_OWN: dict[str, Callable[[Study], Answer]] = {
    module.__name__.rpartition(".")[2]: module.answer
    for module in (
        *(profile, multi_gpu, amp, workers, torch_compile, batch_size, exchange, all_reduce, peers, quality, claims),
    )
}


@once
def answer(study: Study) -> Answer:
    """Return the answer that the records of a study give to its question."""
    if study.experiment == "recommendation":
        return _recommendation(study)
    own = _OWN.get(study.experiment)
    return own(study) if own else speeds(study, compared(study))


def _recommendation(study: Study) -> Answer:
    """What a search found, by the sets that measured it again; without one what all questions came to."""
    searched, found = recommendation.recommendation(study), _recommended(study)
    largest = "The largest batch that fits, and the speed and memory of each size."
    views = [View(caption=largest, name="batch_size", figure=lambda: batch_sizes_beside(study))]
    if searched is None:
        return Answer(
            study=study,
            finding=found,
            figure=lambda: figure_ratios.changes(study, found),
            table=lambda: gains.table(study),
            views=views,
        )
    tried = "What the search tried, by what all its short sets say."
    changes = "Every change that was measured, each against its own baseline in the same sets."
    views.append(View(caption=tried, table=lambda: recommendation.tried_table(searched)))
    views.append(View(caption=changes, table=lambda: gains.table(study)))
    return Answer(
        study=study,
        finding=found,
        figure=lambda: figure_waterfalls.recommendation(searched, found.headline),
        table=lambda: recommendation.table(searched),
        views=views,
    )


def _recommended(study: Study) -> Finding:
    """What a search found, by the sets that measured it again; without one what all questions came to."""
    searched, single = recommendation.recommendation(study), gains.answer(study)
    if searched is None or (not searched.reach and gains.measured(study)):
        return _combined(study, single)
    if not searched.count and single.status == ANSWERED and single.row:
        return _combined(study, single)  # which may be used now
    where = replace(study, records=searched.study.records)
    headline, text, lead = recommendation.answer(searched)
    notes = (text.removeprefix(f"{headline}. "), *machine_state.warnings(where))
    if lead is None:
        return plain(where, headline, ANSWERED, *notes)
    found = about(where, lead, headline, *notes)
    if searched.count:
        return replace(found, status=ANSWERED)
    way_out = recommendation.command(searched, "--seeds 8")
    return replace(found, status=gains.UNTRIED, way_out=way_out) if searched.reach else found


def _combined(study: Study, said: gains.Answer) -> Finding:
    """What the answers to all questions come to together."""
    warnings = machine_state.warnings(study)
    if said.row is None:
        found = plain(study, said.headline, said.status, said.detail, *warnings)
    else:
        detail = said.detail.removeprefix(sentences.evidence(said.row))
        found = replace(about(study, said.row, said.headline, detail, *warnings), status=said.status)
    return replace(found, way_out=said.way_out)
