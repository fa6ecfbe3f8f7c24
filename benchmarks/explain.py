"""Cost of request explanations, and their accuracy.

python benchmarks/explain.py [--parts PART ...] [--out build/bench/explain.json]

account   cost of a worker's time breakdowns, as a share of its steps (explain_account.py)
sums      difference between the spans of a request and its measured time, and the CPU time of its
          router for explanations (explain_sums.py)

The ratio overhead_router needs both parts. It is the router's CPU time for explanations of the
tokens of one step with 256 running requests, divided by the time of a step of the 125M checkpoint.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks import explain_account, explain_sums, report
from benchmarks.explain_account import RUNNING, Measured

PARTS = {
    "account": explain_account.measure,
    "sums": explain_sums.measure,
}


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
        ratios=_ratios(measured),
    )


def _ratios(measured: dict[str, Measured]) -> dict[str, float]:
    ratios = {name: value for it in measured.values() for name, value in it.ratios.items()}
    if {"account", "sums"} <= measured.keys():
        step_us = 1e3 * measured["account"].raw["small"]["step_ms"]
        token_us = measured["sums"].raw["router_us_a_token"]
        ratios["overhead_router"] = round(RUNNING * token_us / step_us, 5)
    return ratios


if __name__ == "__main__":
    main()
