"""What it costs to be able to say where a request's time went.

python tests/perf/explain.py [--parts PART ...] [--out build/bench/explain.json]

account   what a worker's accounts take of its steps (explain_account.py)
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.perf import explain_account, report

PARTS = {"account": explain_account.measure}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=[*PARTS])
    parser.add_argument("--out", type=Path, default=Path("build/bench/explain.json"))
    options = parser.parse_args()
    measured = {part: PARTS[part]() for part in options.parts}
    report.write(
        options.out,
        packages=["torch", "numpy", "protobuf"],
        settings={part: it.settings for part, it in measured.items()},
        raw={part: it.raw for part, it in measured.items()},
        ratios={name: value for it in measured.values() for name, value in it.ratios.items()},
    )


if __name__ == "__main__":
    main()
