"""How large a batch fits, and does a larger one train faster?"""

from dataclasses import replace

from ddpm_lab.config import RunConfig
from ddpm_lab.explain import phrases
from ddpm_lab.explain.answer import Answer, speeds
from ddpm_lab.explain.comparisons import comparisons, families
from ddpm_lab.explain.findings import compared
from ddpm_lab.explain.selection import Study
from ddpm_lab.measure.alone import search_ended
from ddpm_lab.plan import Experiment, Family, Question
from ddpm_lab.training.setting import Batches, Precision, Setup, WorldSize

QUESTION = Question(title="How large a batch fits, and does a larger one train faster?", file="batch_size", trains=True)

CAVEAT = "Equal images in other batches are not equal training."

MOST_CPU, MOST_CUDA = 1024, 65_536  # where a search for the largest batch ends if nothing else ends it


def batch_size(
    setup: Setup, *, global_batch_sizes: Batches = None, precision: Precision | None = None, world_size: WorldSize = 1
) -> Experiment:
    """How large a batch fits, and does a larger one train faster? The smallest size against its multiples."""
    cuda, precision = setup.device == "cuda", precision or setup.plain_precision
    setup.check_ranks(world_size)
    first = 32 if setup.preset == "full" else setup.batch_size(None)
    count = {"smoke": 2, "quick": 5, "full": 8 if cuda else 5}[setup.preset]
    usual = [-(-first * 2**i // world_size) * world_size for i in range(count)]
    smallest, *larger = sorted(set(global_batch_sizes or usual))
    most = 2 * max(usual) if setup.preset == "smoke" else MOST_CUDA if cuda else MOST_CPU
    base = setup.config(global_batch_size=smallest, precision=precision, world_size=world_size)
    family = Family(
        name=f"{setup.family_name(None, world_size)}, {setup.precision_name(precision)}",
        baseline=base,
        baseline_label=f"batch {smallest}",
        candidates=tuple((f"batch {n}", replace(base, global_batch_size=n)) for n in larger),
        search_up_to=max(most, smallest, *larger),
        primary=f"batch {larger[min(1, len(larger) - 1)]}" if larger else "",
    )
    return Experiment(name="batch_size", families=(family,))


def answer(study: Study) -> Answer:
    """Return the answer: the speed of each batch size, and the largest one that fits."""
    return speeds(study, compared(study, notes=[sentence(study)]))


def sentence(study: Study) -> str:
    """Return a sentence on the largest batch of each family, compared or only searched, and a caveat; empty if none."""
    configs = [(rows[0].family, rows[0].config) for rows in families(comparisons(study))]
    configs = configs or list({r.family: r.config for r in study.records if r.role == "largest"}.items())
    several = len(configs) > 1
    parts = [f"with {family} " * several + _largest(study, config) for family, config in configs]
    return f"{phrases.begun('; '.join(parts))}. {CAVEAT}" if parts else ""


def _largest(study: Study, config: RunConfig) -> str:
    """Return text such as "the largest batch that fits is 512 images (576 images are out of memory)"."""
    end = search_ended(study.records, config)
    if end is None:
        return "the largest batch that fits was not found"
    if end.status != "ok":
        return f"no batch fits ({end.reason})"
    images = phrases.plural(end.config.global_batch_size, "image")
    if end.label == "memory":
        return f"the largest batch that fits is {images} ({end.reason})"
    return f"a batch of {images} fits, where the search ended ({end.reason})"
