"""Write environment.yml from uv.lock (``make lock``)."""

import subprocess
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
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
    options = ["--frozen", "--quiet", "--no-dev", "--no-emit-project", "--no-hashes", "--no-annotate", "--no-header"]
    command = [str(CHECKOUT / ".boot" / "uv"), "export", *options]
    listed = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=True).stdout
    lines = [line.removesuffix(" ; sys_platform == 'linux'") for line in listed.splitlines()]
    return HEADER + "".join(f"      - {line}\n" for line in lines)


if __name__ == "__main__":
    (CHECKOUT / "environment.yml").write_text(environment_yml())
