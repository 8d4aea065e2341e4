"""What a configuration says of a user's training, which is run in place of the lab's own."""

from __future__ import annotations

from typing import Any

OWN = "ddpm_lab.model.own:own"
OWN_LOADER = "ddpm_lab.model.own:loader_alone"
"""The workloads that run it; the option ``make`` names the function that makes it, as module:function."""
MADE = ("parameters", "samples", "sample")
"""Options that say what the function made when it was looked at: that much must be the same each time it is called."""
TRIED = ("images", "draws")
"""Options of a trial; all others say which training it is."""
ABLE: dict[str, Any] = {"accumulation": (1,), "implementation": ("lab",), "kernels": ("aten",), "read_loss": (False,)}
ABLE |= {"attention_axis": ("channels",), "compile": ("off", "whole"), "loader": ("files", "packed")}
"""What it can be set to, where that is less than the lab's own trainer can."""
