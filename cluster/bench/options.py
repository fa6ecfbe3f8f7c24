"""Command line options of a load, other than its requests."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from cluster.bench.load import REQUESTS
from cluster.config import API_KEY_VARIABLE
from cluster.simulator.workloads.options import PANEL as _WHICH

_WHERE, _WHEN, _OUT = "The endpoint", "When requests come", "What comes out"


def _option(*names: str, panel: str, **more: Any) -> Any:
    return typer.Option(*names, rich_help_panel=panel, **more)


Url = Annotated[
    str | None,
    _option(
        "--url",
        panel=_WHERE,
        metavar="URL",
        help="One of OpenAI's API, as http://127.0.0.1:8000/v1. Default: a cluster, by gRPC.",
    ),
]
Chat = Annotated[
    bool, _option("--chat", panel=_WHERE, help="Chats instead of completions, with --url.")
]
Model = Annotated[
    str | None,
    _option("--model", panel=_WHERE, help="With --url. Default: the first that is listed."),
]
ApiKey = Annotated[
    str | None,
    _option(
        "--api-key",
        panel=_WHERE,
        envvar=API_KEY_VARIABLE,
        metavar="KEY",
        help="Better in the environment: others see what is typed.",
    ),
]
IgnoreEos = Annotated[
    bool,
    _option(
        "--ignore-eos/--no-ignore-eos",
        panel=_WHERE,
        help="Outputs become as long as they may. Not every endpoint knows it.",
    ),
]
Temperature = Annotated[float, _option("--temperature", panel=_WHERE, min=0, help="Of sampling.")]
ExtraBody = Annotated[
    str | None,
    _option("--extra-body", panel=_WHERE, metavar="JSON", help="Fields of every body, with --url."),
]
TokenizerFile = Annotated[
    Path | None,
    _option(
        "--tokenizer",
        panel=_WHERE,
        metavar="DIR",
        help="A model's: prompts get their exact lengths, and outputs are counted by it where "
        "the endpoint does not.",
    ),
]

InputTokens = Annotated[
    int,
    _option(
        "--input-tokens", panel=_WHICH, min=1, help="Tokens of each prompt, if no dataset says it."
    ),
]
OutputTokens = Annotated[
    int,
    _option(
        "--output-tokens", panel=_WHICH, min=1, help="Tokens of each output, if no dataset says it."
    ),
]
LongestInput = Annotated[
    int | None,
    _option("--max-input", panel=_WHICH, min=1, metavar="N", help="Longer prompts are cut."),
]
LongestOutput = Annotated[
    int | None,
    _option("--max-output", panel=_WHICH, min=1, metavar="N", help="Longer outputs are cut."),
]
Number = Annotated[
    int | None,
    _option(
        "--requests",
        panel=_WHICH,
        min=1,
        metavar="N",
        help=f"So many at most. Default: {REQUESTS}, a whole trace, or what comes in --duration.",
    ),
]

Rate = Annotated[
    float | None,
    _option(
        "--rate",
        panel=_WHEN,
        metavar="R",
        help="Requests a second on average, or inf. Default: the workload's or the trace's own "
        "moments, else all at once.",
    ),
]
Burstiness = Annotated[
    float,
    _option(
        "--burstiness",
        panel=_WHEN,
        metavar="B",
        help="Shape of the Gamma-distributed gaps: 1 is Poisson, below 1 bursts, inf constant.",
    ),
]
Duration = Annotated[
    float | None,
    _option(
        "--duration", panel=_WHEN, metavar="S", help="So long requests come; of a ramp each stage."
    ),
]
RampText = Annotated[
    str | None,
    _option(
        "--ramp",
        panel=_WHEN,
        metavar="FIRST:MOST",
        help="Rates between these two, until saturation is found.",
    ),
]
Concurrency = Annotated[
    int | None,
    _option(
        "--concurrency",
        panel=_WHEN,
        min=1,
        metavar="N",
        help="Most requests at once. Without --rate a closed loop of N clients.",
    ),
]
WarmUp = Annotated[
    int, _option("--warm-up", panel=_WHEN, min=0, metavar="N", help="Requests that do not count.")
]
Timeout = Annotated[
    float, _option("--timeout", panel=_WHEN, min=0.001, metavar="S", help="Timeout of one request.")
]

Goodput = Annotated[
    list[str] | None,
    _option(
        "--goodput",
        panel=_OUT,
        metavar="NAME:MS",
        help='Limits of a good request in ms: "ttft:500 tpot:50", also e2el. Repeatable.',
    ),
]
Percentiles = Annotated[
    str,
    _option("--percentiles", panel=_OUT, metavar="P,P,...", help="Percentiles to report."),
]
DEFAULT_PERCENTILES = "50,90,95,99"
JsonFile = Annotated[
    Path | None,
    _option(
        "--json", panel=_OUT, metavar="FILE", help="Write it there, with vLLM's keys and more."
    ),
]
HtmlFile = Annotated[
    Path | None, _option("--html", panel=_OUT, metavar="FILE", help="Write a page there.")
]
Detailed = Annotated[
    bool, _option("--detailed", panel=_OUT, help="With --json: each request's times, too.")
]
Label = Annotated[str, _option("--label", panel=_OUT, help="Stands in the reports.")]
