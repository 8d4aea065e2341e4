"""Bring uv.lock, requirements.lock and environment.yml in step with pyproject.toml (``make lock``).

Needs the uv that set-up found or fetched (``.boot/uv``) and, for uv.lock, the network.
"""

import os
import subprocess
import tomllib
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
CONDA_PYTHON = "3.12"
NAMED_IN_CONDA = ("torch", "torchvision", "jupyterlab", "papermill", "matplotlib", "pandas", "nbconvert")
EXPORT = ("export", "--frozen", "--no-dev", "--no-emit-project", "--no-header")
HEADER = """\
# The same packages as uv.lock, for conda users. Written by `make lock`; do not edit.
#
#   conda env create --file environment.yml
#   conda activate ddpm-lab
#   pip install --no-deps --editable .
#   ddpm-lab report
#
# Everything but Python itself comes from PyPI with the hashes of requirements.lock. The named packages are the ones
# the notebooks are written against; the lock file comes first because pip takes their hashes from it.
"""


def environment_yml(lock: dict[str, list[dict[str, str]]]) -> str:
    """Return the text of environment.yml for a parsed uv.lock."""
    versions: dict[str, set[str]] = {}
    for package in lock["package"]:
        versions.setdefault(package["name"], set()).add(package["version"])
    lines = ["-r requirements.lock"]
    for name in NAMED_IN_CONDA:
        (version,) = versions[name]
        lines.append(f"{name}=={version}")
    pip_section = "".join(f"      - {line}\n" for line in lines)
    return (
        f"{HEADER}name: ddpm-lab\nchannels:\n  - conda-forge\ndependencies:\n"
        f"  - python={CONDA_PYTHON}\n  - pip\n  - pip:\n{pip_section}"
    )


def main() -> None:
    """Write the three files."""
    uv = str(CHECKOUT / ".boot" / "uv")
    # A package index of this machine only must not leave its address in a file for everybody.
    private = ("UV_INDEX", "UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS")
    environment = {name: value for name, value in os.environ.items() if name not in private}
    subprocess.run([uv, "lock"], cwd=CHECKOUT, env=environment, check=True)
    export = [uv, *EXPORT, "--quiet", "--output-file", "requirements.lock"]
    subprocess.run(export, cwd=CHECKOUT, env=environment, check=True)
    lock = tomllib.loads((CHECKOUT / "uv.lock").read_text())
    (CHECKOUT / "environment.yml").write_text(environment_yml(lock))


if __name__ == "__main__":
    main()
