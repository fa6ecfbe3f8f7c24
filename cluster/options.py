"""Command-line options of a request, each defined once under its name in GenerateOptions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from everlift.errors import InvalidRequest
from everlift.options import GenerateOptions

_SAMPLING, _FORM, _REQUEST = "Sampling", "Output", "The request"
_TEXT_OR_FILE = "TEXT|@FILE"


def _number(kind: type, text: str, panel: str = _SAMPLING) -> object:
    return Annotated[kind | None, typer.Option(help=text, rich_help_panel=panel)]


def _texts(text: str, panel: str, **more: Any) -> object:
    return Annotated[
        list[str] | None,
        typer.Option(help=f"{text} Repeatable.", rich_help_panel=panel, **more),
    ]


def _text(text: str, panel: str, **more: Any) -> object:
    return Annotated[str | None, typer.Option(help=text, rich_help_panel=panel, **more)]


def _switch(name: str, text: str, panel: str) -> object:
    return Annotated[bool, typer.Option(name, help=text, rich_help_panel=panel)]


#: Options in the form that typer expects, by their names in GenerateOptions.
OPTIONS: Mapping[str, Any] = {
    "max_tokens": _number(int, "Maximum number of tokens to generate.", _REQUEST),
    "clamp_max_tokens": _switch(
        "--clamp-max-tokens",
        "Reduce max_tokens if prompt and output would exceed the context.",
        _REQUEST,
    ),
    "truncate_prompt_tokens": _number(
        int,
        "Use only this many last tokens of the prompt; -1: as many as fit beside the output.",
        _REQUEST,
    ),
    "images": Annotated[
        list[Path] | None,
        typer.Option(
            "--image",
            help="Image for the next placeholder in the prompt. Repeatable.",
            metavar="FILE",
            rich_help_panel=_REQUEST,
        ),
    ],
    "n": _number(int, "Number of outputs of the prompt; default 1.", _REQUEST),
    "temperature": _number(
        float, "Sampling temperature; 0 is greedy. Default: the model's, else 1."
    ),
    "top_p": _number(float, "Cumulative probability for nucleus sampling."),
    "top_k": _number(int, "Sample only from the K most likely tokens."),
    "min_p": _number(float, "Minimum probability of a token, relative to the most likely one."),
    "seed": _number(int, "Seed of the sampling."),
    "repetition_penalty": _number(
        float, "Divide the logits of tokens that occurred by this; default: the model's, else 1."
    ),
    "presence_penalty": _number(
        float, "Subtract this from the logits of tokens in the output; default 0."
    ),
    "frequency_penalty": _number(
        float, "Subtract this from a token's logit for each occurrence in the output; default 0."
    ),
    "logit_bias": _texts("Add VALUE to the logit of token ID.", _SAMPLING, metavar="ID=VALUE"),
    "allowed_token_ids": Annotated[
        list[int] | None,
        typer.Option(
            "--allowed-token-id",
            help="Sample only this token. Repeatable.",
            rich_help_panel=_SAMPLING,
        ),
    ],
    "bad_words": Annotated[
        list[str] | None,
        typer.Option(
            "--bad-word",
            help="Do not generate the tokens of this text. Repeatable.",
            rich_help_panel=_SAMPLING,
        ),
    ],
    "min_tokens": _number(int, "Minimum number of tokens before a stop condition takes effect."),
    "logprobs": _number(int, "Show log probabilities with this many alternatives.", _FORM),
    "prompt_logprobs": _number(
        int, "Show log probabilities of the prompt with this many alternatives.", _FORM
    ),
    "json_schema": _text("JSON schema of the output.", _FORM, metavar=_TEXT_OR_FILE),
    "regex": _text("Regular expression of the output.", _FORM),
    "ebnf": _text(
        'Grammar of the output in GBNF, with a rule "root".', _FORM, metavar=_TEXT_OR_FILE
    ),
    "choice": _texts("Allowed output.", _FORM),
    "stop": _texts("End the output before this text.", _FORM),
    "stop_token_ids": Annotated[
        list[int] | None,
        typer.Option(
            "--stop-token-id",
            help="End the output at this token. Repeatable.",
            rich_help_panel=_FORM,
        ),
    ],
    "include_stop": _switch("--include-stop", "Keep the stop text in the output.", _FORM),
    "ignore_eos": _switch("--ignore-eos", "Continue after an end-of-sequence token.", _FORM),
    "session_id": _text("Id of the session (conversation) to which the request belongs.", _REQUEST),
    "cache_salt": _text("Share prefix-cache blocks only with requests of the same salt.", _REQUEST),
    "timeout_s": Annotated[
        float | None,
        typer.Option("--timeout", help="Deadline in seconds.", rich_help_panel=_REQUEST),
    ],
    "priority": _number(
        int, "Class from -10 to 10; a higher one leaves the queue first.", _REQUEST
    ),
    "ttft_target_s": Annotated[
        float | None,
        typer.Option(
            "--ttft-target",
            help="Target for the time to first token, in seconds.",
            rich_help_panel=_REQUEST,
        ),
    ],
    "request_id": _text(
        "Id of the request. A call with the id of an existing request attaches to it.", _REQUEST
    ),
}


def takes_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace ``**options`` in the signature of ``command`` by a parameter for each of OPTIONS.

    The decorator returns the same function. It is needed because typer reads a command's options
    from its signature.
    """
    own = inspect.signature(command, eval_str=True)
    named = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
    options = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=False if _is_switch(kind) else None,
            annotation=kind,
        )
        for name, kind in OPTIONS.items()
    ]
    command.__signature__ = own.replace(parameters=[*named, *options])  # type: ignore[attr-defined]
    return command


def _is_switch(kind: Any) -> bool:
    return kind.__origin__ is bool


def generate_options(values: Mapping[str, Any]) -> GenerateOptions:
    """Return the options of a request for the values that were given on the command line.

    ``values`` maps names of OPTIONS to values. Options that were not given are left out. The value
    "@FILE" of json_schema or ebnf is replaced by the text of FILE, and each path in images by the
    bytes of its file. No other value is checked.

    Raises:
        InvalidRequest: logit_bias is malformed, or FILE is not UTF-8 or in an unknown home
            directory.
        OSError: A file cannot be read.
    """
    given = {name: value for name, value in values.items() if _is_set(value)}
    for name in ("json_schema", "ebnf"):
        if name in given:
            given[name] = _read(given[name])
    if "images" in given:
        given["images"] = [path.read_bytes() for path in given["images"]]
    if "logit_bias" in given:
        given["logit_bias"] = dict(map(_bias, given["logit_bias"]))
    return cast(GenerateOptions, given)


def _is_set(value: object) -> bool:
    return value is not None and value is not False and value != []


def _read(text: str) -> str:
    if not text.startswith("@"):
        return text
    name = text[1:]
    try:
        return Path(name).expanduser().read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InvalidRequest(f"{name} is not UTF-8") from None
    except RuntimeError:
        raise InvalidRequest(f"{name}: the home directory of this user is unknown") from None


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise InvalidRequest(f"--logit-bias must be ID=VALUE, not {text!r}") from None
