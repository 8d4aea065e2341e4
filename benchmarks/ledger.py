"""How long does a ledger of 100,000 records take to open, and its figures to draw?

    python benchmarks/ledger.py

Copies the published records, in twenty code versions, until there are so many; prints the seconds of each part: what a
notebook takes to show its question, and what all questions take together.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from ddpm_lab import experiments, published
from ddpm_lab.explain import figures
from ddpm_lab.explain.frames import RECOMMENDATION
from ddpm_lab.explain.show import NAMES
from ddpm_lab.ledger import Ledger

CHECKOUT = Path(__file__).resolve().parents[1]
VERSIONS = 20


def main() -> None:
    """Make the ledger, open it, draw from it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=100_000)
    options = parser.parse_args()
    source = sorted((CHECKOUT / published.RECORDS).glob("*.jsonl"))[0]
    records, _ = Ledger(source).read()
    lines = [line for line in source.read_text().splitlines(keepends=True) if line.strip()]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "ledger.jsonl")
        with path.open("w") as file:
            for i in range(options.records):
                r, line = records[i % len(lines)], lines[i % len(lines)]
                version = f"{i * VERSIONS // options.records:012x}"
                line = line.replace(f'"code_version":"{r.code_version}"', f'"code_version":"{version}"')
                file.write(line.replace(f'"set_id":"{r.set_id}"', f'"set_id":"{r.set_id}-{i // len(lines)}"', 1))
        print(f"{options.records:,} records, {path.stat().st_size / 1e6:,.0f} MB, {VERSIONS} code versions")
        begun = time.perf_counter()
        heads, _ = Ledger(path).heads()
        print(f"opened: {time.perf_counter() - begun:.2f} s ({len(heads):,} heads)")
        for name in NAMES:
            begun = time.perf_counter()
            every = name == RECOMMENDATION
            study = experiments.recommendation(ledger=path) if every else experiments.run(name, ledger=path)
            pictures = [figures.figure(study), *(further for _, further, _ in figures.more(study))]
            count = len([figures.png(picture) for picture in pictures])
            print(f"opened and the page of {name} drawn: {time.perf_counter() - begun:.2f} s ({count} figures)")
        begun = time.perf_counter()
        drawn = published.rebuild([path], None, Path(folder))
        print(f"opened and all figures drawn: {time.perf_counter() - begun:.2f} s ({len(drawn)} questions)")


if __name__ == "__main__":
    main()
