"""What it costs to be able to say where a request's time went, and whether what is said adds up.

python tests/perf/explain.py [--parts PART ...] [--out build/bench/explain.json]

account   what a worker's accounts take of its steps (explain_account.py)
sums      how far the spans of requests are from their time by a stopwatch (explain_sums.py)
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.perf import explain_account, explain_sums, report

PARTS = {"account": explain_account.measure, "sums": explain_sums.measure}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=[*PARTS])
    parser.add_argument("--out", type=Path, default=Path("build/bench/explain.json"))
    options = parser.parse_args()
    measured = {part: PARTS[part]() for part in options.parts}
    report.write(
        options.out,
        packages=["torch", "numpy", "protobuf", "grpcio"],
        settings={part: it.settings for part, it in measured.items()},
        raw={part: it.raw for part, it in measured.items()},
        ratios={name: value for it in measured.values() for name, value in it.ratios.items()},
    )


if __name__ == "__main__":
    main()
