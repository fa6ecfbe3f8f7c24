"""Command line options of ``everlift bench``, except those of workloads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from cluster.bench.load import REQUESTS
from cluster.config import API_KEY_VARIABLE
from cluster.simulator.workloads.options import PANEL as _WHICH

_WHERE, _WHEN, _OUT = "The endpoint", "Arrivals", "The report"


def _option(*names: str, panel: str, **more: Any) -> Any:
    return typer.Option(*names, rich_help_panel=panel, **more)


Url = Annotated[
    str | None,
    _option(
        "--url",
        panel=_WHERE,
        metavar="URL",
        help="OpenAI endpoint, such as http://127.0.0.1:8000/v1. Default: a cluster, over gRPC.",
    ),
]
Chat = Annotated[
    bool, _option("--chat", panel=_WHERE, help="Send chats instead of completions. Needs --url.")
]
Model = Annotated[
    str | None,
    _option(
        "--model",
        panel=_WHERE,
        help="Model to request; needs --url. Default: the endpoint's first one.",
    ),
]
ApiKey = Annotated[
    str | None,
    _option(
        "--api-key",
        panel=_WHERE,
        envvar=API_KEY_VARIABLE,
        metavar="KEY",
        help="API key. Prefer the environment variable: command lines are visible to others.",
    ),
]
IgnoreEos = Annotated[
    bool,
    _option(
        "--ignore-eos/--no-ignore-eos",
        panel=_WHERE,
        help="Generate outputs of the full length. Not every endpoint supports this.",
    ),
]
Temperature = Annotated[
    float, _option("--temperature", panel=_WHERE, min=0, help="Sampling temperature.")
]
ExtraBody = Annotated[
    str | None,
    _option(
        "--extra-body",
        panel=_WHERE,
        metavar="JSON",
        help="JSON object with further fields of every request body. Needs --url.",
    ),
]
TokenizerFile = Annotated[
    Path | None,
    _option(
        "--tokenizer",
        panel=_WHERE,
        metavar="DIR",
        help="Directory of the model's tokenizer, for exact prompt lengths and for counting "
        "output tokens.",
    ),
]

InputTokens = Annotated[
    int,
    _option(
        "--input-tokens",
        panel=_WHICH,
        min=1,
        help="Length of each prompt in tokens, without a workload or trace.",
    ),
]
OutputTokens = Annotated[
    int,
    _option(
        "--output-tokens",
        panel=_WHICH,
        min=1,
        help="Length of each output in tokens, without a workload or trace.",
    ),
]
LongestInput = Annotated[
    int | None,
    _option(
        "--max-input",
        panel=_WHICH,
        min=1,
        metavar="N",
        help="Maximum length of a prompt in tokens; longer prompts are truncated.",
    ),
]
LongestOutput = Annotated[
    int | None,
    _option(
        "--max-output",
        panel=_WHICH,
        min=1,
        metavar="N",
        help="Maximum length of an output in tokens; longer outputs are truncated.",
    ),
]
Number = Annotated[
    int | None,
    _option(
        "--requests",
        panel=_WHICH,
        min=1,
        metavar="N",
        help=f"Number of requests. Default: the whole trace, all within --duration, or {REQUESTS}.",
    ),
]

Rate = Annotated[
    float | None,
    _option(
        "--rate",
        panel=_WHEN,
        metavar="R",
        help="Mean requests per second, or inf. Default: the arrival times of the workload or "
        "trace, else all at once.",
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
        "--duration",
        panel=_WHEN,
        metavar="S",
        help="Length of the load in seconds; with --ramp, of each stage.",
    ),
]
RampText = Annotated[
    str | None,
    _option(
        "--ramp",
        panel=_WHEN,
        metavar="FIRST:MOST",
        help="Range in which to search for the highest sustained rate, in requests per second.",
    ),
]
Concurrency = Annotated[
    int | None,
    _option(
        "--concurrency",
        panel=_WHEN,
        min=1,
        metavar="N",
        help="Maximum number of concurrent requests. Without --rate, a closed loop of N clients.",
    ),
]
WarmUp = Annotated[
    int,
    _option(
        "--warm-up",
        panel=_WHEN,
        min=0,
        metavar="N",
        help="Number of warm-up requests, which are not counted.",
    ),
]
Timeout = Annotated[
    float,
    _option(
        "--timeout", panel=_WHEN, min=0.001, metavar="S", help="Timeout of one request, in seconds."
    ),
]

Goodput = Annotated[
    list[str] | None,
    _option(
        "--goodput",
        panel=_OUT,
        metavar="NAME:MS",
        help='Latency limits of a good request in ms: "ttft:500 tpot:50", also e2el. Repeatable.',
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
        "--json",
        panel=_OUT,
        metavar="FILE",
        help="File for the report as JSON: the keys of `vllm bench serve`, and further ones.",
    ),
]
HtmlFile = Annotated[
    Path | None,
    _option("--html", panel=_OUT, metavar="FILE", help="File for the report as an HTML page."),
]
Detailed = Annotated[
    bool, _option("--detailed", panel=_OUT, help="Add the times of each request to the JSON.")
]
Label = Annotated[str, _option("--label", panel=_OUT, help="Label of the load in reports.")]
