"""What the options of ``run`` mean for each experiment, and which of them an experiment does not take."""

from __future__ import annotations

import argparse
import inspect
from typing import TYPE_CHECKING, Any

from ddpm_lab.checks import ConfigError, whole_numbers, whole_options

if TYPE_CHECKING:
    from ddpm_lab.explain.strategy import Strategy

_LISTS = ("parts", "trainers", "candidates")
_OWNED = {
    **dict.fromkeys(("parts", "trainers"), "peers"),
    **dict.fromkeys(("candidates", "inception", "fid_images"), "quality"),
    **dict.fromkeys(("scaling", "lost_scaling"), "multi_gpu"),
}
"""Options that one experiment alone takes."""


def grid(name: str, options: argparse.Namespace, weighed: Strategy | None) -> dict[str, Any]:
    """What --mode and --batch-size mean for an experiment; ``weighed`` is what --mode auto rests on."""
    from ddpm_lab.setting import usual_device  # noqa: PLC0415
    from ddpm_lab.strategy import most_ranks, several_ranks  # noqa: PLC0415

    found: dict[str, Any] = {}
    found |= {name: value for name in ("seeds", "images") if (value := getattr(options, name)) is not None}
    for option, owner in _OWNED.items():
        if (given := getattr(options, option)) is not None:
            if name != owner:
                flag = option.replace("_", "-")
                raise ConfigError(f"--{flag}: the experiment {name} has none; only {owner} takes it")
            found[option] = [word.strip() for word in given.split(",")] if option in _LISTS else given
    if options.world_sizes is not None:
        return found | _batch(name, options) | _world_sizes(name, options)
    if options.mode and name in ("peers", "quality", "claims"):
        raise ConfigError(f"--mode: the experiment {name} chooses its ranks itself; leave it out")
    found |= _batch(name, options)
    if options.mode == "multi" and name == "workers":
        raise ConfigError(
            "--mode multi: the experiment workers trains with one rank; leave it out or use --mode single"
        )
    if options.mode and name != "workers":
        device = usual_device(options.device)
        most = most_ranks(device)[0]
        if weighed is not None and name == "multi_gpu":
            found["global_batch_sizes"] = [weighed.batch]
            if weighed.answer != "single" and most > 1:
                return found  # one rank and several
        multi = options.mode == "multi" or (weighed is not None and weighed.answer == "multi" and most > 1)
        if not multi and name in ("exchange", "all_reduce"):
            said = "" if weighed is None else f" ({weighed.answer} for {weighed.network}, batch {weighed.batch})"
            raise ConfigError(
                f"--mode {options.mode}{said}: one rank exchanges nothing, which leaves {name} nothing to measure; "
                "use --mode multi or leave it out"
            )
        ranks = several_ranks(device, oversubscribe=options.oversubscribe) if multi else 1
        found |= {"world_size": ranks} if name in ("profile", "batch_size") else {"world_sizes": [ranks]}
    return found


def _batch(name: str, options: argparse.Namespace) -> dict[str, Any]:
    if options.batch_size is None:
        return {}
    if name in ("batch_size", "all_reduce"):
        why = "varies it" if name == "batch_size" else "has no images"
        raise ConfigError(f"--batch-size: the experiment {name} {why}; leave it out")
    whole_options(vars(options), batch_size=1)
    return (
        {"global_batch_sizes": [options.batch_size]}
        if name == "multi_gpu"
        else {"global_batch_size": options.batch_size}
    )


def _world_sizes(name: str, options: argparse.Namespace) -> dict[str, Any]:
    from ddpm_lab.questions import QUESTIONS  # noqa: PLC0415

    able = [q for q, function in QUESTIONS.items() if "world_sizes" in inspect.signature(function).parameters]
    if name not in able:
        raise ConfigError(f"--world-sizes: the experiment {name} has none; only {', '.join(able)} take them")
    if options.mode:
        raise ConfigError(f"--world-sizes and --mode {options.mode} both say how many ranks: leave one of them out")
    return {"world_sizes": whole_numbers("--world-sizes", options.world_sizes)}
