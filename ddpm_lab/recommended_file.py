"""The recommended settings as a file that ``ddpm-lab train --config`` takes."""

from __future__ import annotations

from pathlib import Path

from ddpm_lab.explain import recommended_words
from ddpm_lab.explain.frames import Study
from ddpm_lab.explain.recommended import forecast, recommendation
from ddpm_lab.files import replace
from ddpm_lab.record import LedgerError
from ddpm_lab.run_folder import OWN
from ddpm_lab.settings_file import settings_text

NAME = "recommended.toml"


def write(study: Study) -> Path | None:
    """Write what the last search in a study recommends into its output folder; None where there was no search.

    Nor is one written of the user's own training, whose settings the answer names.

    Where nothing was shown to be faster and not worse that is the baseline. The steps are those of the projected
    training. Raises LedgerError if the folder cannot be written.
    """
    found = recommendation(study)
    if found is None or found.config.is_own:  # which ddpm-lab train does not train
        return None
    here = Path(found.config.data).is_dir()
    values = {name: value for name, value in found.config.as_dict().items() if name not in OWN}
    if not here:  # the images of the machine that measured are not on this one
        values = {name: value for name, value in values.items() if name not in ("data", "data_sha256")}
    steps = max(1, forecast(found, found.best).images // found.config.global_batch_size)
    told = [
        recommended_words.answer(found)[0] + ", so these are the settings of the baseline" * (not found.count),
        f"Measured on {found.study.hardware}, {found.study.date}, by ddpm-lab recommend.",
        "Give it to: ddpm-lab train --config recommended.toml --output-dir FOLDER",
    ]
    text = "".join(f"# {' '.join(line.split())}\n" for line in told) + settings_text(
        {**values, "train": {"steps": steps}}
    )
    path = study.output_dir / NAME
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace(path, text)
    except OSError as error:
        raise LedgerError(f"cannot write {path}: {error.strerror}; choose another --output-dir") from error
    return path
