"""Bring uv.lock and environment.yml in step with pyproject.toml (``make lock``); the first needs the network."""

import os
import subprocess
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
EXPORT = ("export", "--frozen", "--no-dev", "--no-emit-project", "--no-hashes", "--no-annotate", "--no-header")
HEADER = """\
# The packages of uv.lock, for conda users. Written by `make lock`; do not edit.
#
#   conda env create --file environment.yml
#   conda activate ddpm-lab
#   pip install --no-deps --editable .
#   ddpm-lab report
name: ddpm-lab
channels:
  - conda-forge
dependencies:
  - python=3.12
  - pip
  - pip:
"""


def environment_yml() -> str:
    """The text of environment.yml for uv.lock as it stands."""
    uv = str(CHECKOUT / ".boot" / "uv")
    listed = subprocess.run([uv, *EXPORT, "--quiet"], cwd=CHECKOUT, capture_output=True, text=True, check=True).stdout
    lines = [line.removesuffix(" ; sys_platform == 'linux'") for line in listed.splitlines()]
    return HEADER + "".join(f"      - {line}\n" for line in lines)


def main() -> None:
    """Write both files."""
    # A package index of this machine only must not leave its address in a file for everybody.
    private = ("UV_INDEX", "UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS")
    environment = {name: value for name, value in os.environ.items() if name not in private}
    subprocess.run([CHECKOUT / ".boot" / "uv", "lock"], cwd=CHECKOUT, env=environment, check=True)
    (CHECKOUT / "environment.yml").write_text(environment_yml())


if __name__ == "__main__":
    main()
