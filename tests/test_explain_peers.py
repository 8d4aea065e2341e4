"""What is said of other trainers, from records with planted ratios."""

import dataclasses

import records as make
from cells import column
from peer_records import COMMON, FAMILY, OWN, WHOLE, study

from ddpm_lab.explain import findings
from ddpm_lab.explain.comparisons import comparisons
from ddpm_lab.plan import LEVERS, OURS
from ddpm_lab.questions import peers
from ddpm_lab.questions.ask import answer


def test_levers_are_shown_apart_and_other_networks_as_families() -> None:
    change = {"NCHW": (dataclasses.replace(OWN, channels_last=False), 0.9)}
    rows = make.sets(change, baseline=OWN, family=FAMILY + LEVERS, count=9, **COMMON)
    small = dataclasses.replace(OWN, network="ddpm", global_batch_size=8)
    rival = {"slow": (dataclasses.replace(small, workload="peer:a"), 0.5)}
    there = make.sets(rival, baseline=small, baseline_label=OURS, family="ddpm, batch 8", count=7, **COMMON)
    both = study(*WHOLE.records, *rows, *there)
    assert "NCHW" not in {r.label for r in peers.other_trainers(both)}
    assert answer(both).finding.ratio == answer(WHOLE).finding.ratio, "of the network that its evidence is about"
    (lever,) = (c for c in comparisons(both) if c.label == "NCHW")
    assert findings.command_of(both, lever) == "ddpm-lab run peers --batch-size 32 --parts levers"
    (levers,) = (rows for caption, rows in answer(both).tables() if caption.startswith("What each setting"))
    assert column(levers, "Configuration")[-1] == "NCHW"
    families = ["ddpm, batch 8", FAMILY, FAMILY + peers.BOTH_FP32]
    own = [row for row in answer(both).table() if row["Configuration"] == f"{OURS} (baseline)"]
    assert sorted(row["Family"] for row in own) == families
    assert len(answer(both).figure().axes) == len(families)
    alone = answer(study(*(r for r in both.records if r.family.endswith(LEVERS)))).finding
    assert (alone.status, alone.verdict) == ("answered", "slower"), "asked for alone, the levers are the answer"
