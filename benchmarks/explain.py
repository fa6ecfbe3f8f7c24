"""What it costs to be able to say where a request's time went, and whether what is said adds up.

python benchmarks/explain.py [--parts PART ...] [--out build/bench/explain.json]

account   what a worker's accounts take of its steps (explain_account.py)
sums      how far the spans of requests are from their time by a stopwatch, and what their router
          does for them (explain_sums.py)

The ratio overhead_router is what a router does for the tokens of a step of the 125M checkpoint with
256 running, of which it is told by the parts together.
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
