"""The commands of ``ddpm-lab slurm``: help everywhere, and nothing is loaded that a login node does not need."""

from __future__ import annotations

import subprocess
import sys

from conftest import Call


def test_the_commands_are_listed(call: Call) -> None:
    code, out, _ = call("slurm", "--help")
    assert code == 0
    assert all(f"  {command} " in out for command in ("submit", "collect", "logs"))
    assert "  slurm " in call("--help")[1]
    assert call("slurm")[0] == 2


def test_a_login_node_needs_no_torch_and_no_pandas() -> None:
    modules = "ddpm_lab.slurm, ddpm_lab.slurm_collect, ddpm_lab.explain.summary, ddpm_lab.slurm_commands"
    script = f"import sys, {modules}; sys.exit(str({{'torch', 'pandas', 'matplotlib'}} & set(sys.modules) or ''))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""
