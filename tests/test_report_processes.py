"""Whole reports: stopped, killed, and the smoke report that was just made."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from test_report import ANSWER, Loads, write

from ddpm_lab.reports import report

SCRIPT = """
import sys
from pathlib import Path
from ddpm_lab.reports.report import report
folder = Path(sys.argv[1])
if __name__ == "__main__":
    sys.exit(report(preset="smoke", output_dir=folder / "out", notebooks=sorted(folder.glob("*.ipynb"))).exit_code)
"""
SLEEP = "import os, time\nprint('began', flush=True)\nopen('pid', 'w').write(str(os.getpid()))\ntime.sleep(300)"


def begin(folder: Path) -> tuple[subprocess.Popen[str], psutil.Process]:
    """A report in a process of its own whose second notebook sleeps; also that notebook's kernel."""
    write(folder / "01_a.ipynb", ANSWER)
    write(folder / "02_b.ipynb", SLEEP)
    write(folder / "03_c.ipynb", ANSWER)
    (folder / "run.py").write_text(SCRIPT)
    command = [sys.executable, "run.py", str(folder)]
    started = subprocess.Popen(command, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    limit = time.monotonic() + 60
    while not (folder / "pid").exists() or not (folder / "pid").read_text():
        assert time.monotonic() < limit
        assert started.poll() is None, started.communicate()[0]
        time.sleep(0.1)
    return started, psutil.Process(int((folder / "pid").read_text()))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_keeps_what_is_done_and_says_what_is_missing(tmp_path: Path, number: int) -> None:
    started, kernel = begin(tmp_path)
    os.kill(started.pid, number)
    output = started.communicate(timeout=30)[0]
    assert started.returncode == 130, output
    assert "Traceback" not in output
    assert not kernel.is_running()
    index = (tmp_path / "out" / "reports" / "index.html").read_text()
    assert "The report was stopped. Not run: 03_c." in index
    assert 'class="chip failed">stopped' in index
    assert "A planted answer" in index
    assert "began" in (tmp_path / "out" / "reports" / "02_b.html").read_text()


@pytest.mark.slow
def test_no_kernel_outlives_a_report_that_is_killed(tmp_path: Path) -> None:
    started, kernel = begin(tmp_path)
    started.kill()
    started.communicate()
    assert psutil.wait_procs([kernel], timeout=10)[1] == []
    assert "To come: 02_b, 03_c." in (tmp_path / "out" / "reports" / "index.html").read_text()


@pytest.mark.slow
@pytest.mark.skipif("SMOKE_REPORT" not in os.environ, reason="SMOKE_REPORT is no folder with a smoke report (.ci/run)")
def test_a_smoke_report_is_whole_and_the_next_one_measures_nothing() -> None:
    output = Path(os.environ["SMOKE_REPORT"])
    measured = (output / "trace_output" / "ledger.jsonl").read_text()
    lines: list[str] = []
    result = report.report(preset="smoke", output_dir=output, progress=lines.append)
    assert result.exit_code == 0, "\n".join(lines)
    after = (output / "trace_output" / "ledger.jsonl").read_text()
    assert after.startswith(measured)
    short = {r["experiment"] for r in map(json.loads, measured.splitlines()) if "did not fit" in (r["reason"] or "")}
    more = {json.loads(line)["experiment"] for line in after.removeprefix(measured).splitlines()}
    assert more <= short, "only what a busy machine had left no time for is measured now"
    findings = {page.name: page.finding for page in result.pages}
    assert len(findings) == 9
    assert "<dd>tiny network</dd>" in result.index.read_text(), "what was trained stands on the first screen"
    for name in ("02_multi_gpu", "03_amp", "04_workers"):
        # One set never gives a verdict.
        assert findings[name]["status"] == "too few sets"
        assert findings[name]["sets"] == 1
    assert findings["01_profile"]["status"] == "answered"
    for name in ("07_peers", "08_quality"):
        assert findings[name]["published"], "it takes too long to be measured here"
    here = [finding for finding in findings.values() if not finding["published"] and finding["code_version"]]
    assert len({finding["code_version"] for finding in here}) == 1
    ledger = [json.loads(line) for line in after.splitlines()]
    asked = {"profile", "multi_gpu", "amp", "workers", "torch_compile", "search", "recommendation"}
    assert asked == {record["experiment"] for record in ledger}
    assert max(len(r["ranks"]) for r in ledger if r["experiment"] == "multi_gpu" and r["status"] == "ok") == 2
    for page in result.pages:
        assert page.image
        assert page.alt
        assert (output / "image_output" / f"{page.name}.png").is_file()
        assert Loads((output / "reports" / f"{page.name}.html").read_text()).fetched == []
    assert list((output / "trace_output").glob("*.json.gz"))
