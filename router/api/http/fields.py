"""Base class and types of request fields, and the fields that all APIs for text share. Pure.

The module everlift.messages defines the ranges of numbers for every protocol, and checks other
limits. A list is checked up to its first invalid element, because pydantic creates an object for
each error and a body may have millions of errors. An error response names one field.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import ErrorDetails, core_schema

from everlift.checks import Range
from everlift.errors import InvalidRequest, UnknownField, Unsupported
from everlift.messages import RANGES, check_field
from everlift.typos import did_you_mean

T = TypeVar("T")
N = TypeVar("N", int, float)
List = Annotated[list[T], Field(fail_fast=True)]
Ids = List[Annotated[int, Field(ge=0, le=2**32 - 1)]]
Object = dict[str, Any]

#: Maximum characters of a field's name in an error message.
_MAX_NAME = 64


@dataclass(frozen=True, slots=True)
class InRange:
    """Annotation that limits a number to the range that everlift.messages has for ``field``.

    ``low`` replaces the lower limit of this range, unless it is None.
    """

    field: str
    low: int | None = None

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.with_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        valid = self._range
        least = "exclusiveMinimum" if valid.exclusive_low else "minimum"
        return {**handler(schema), least: valid.low, "maximum": valid.high}

    def _check(self, value: N, info: ValidationInfo) -> N:
        name = info.field_name or ""
        if self.low is None:
            check_field(self.field, value, name)
        else:
            self._range.check(name, value)
        return value

    @property
    def _range(self) -> Range:
        valid = RANGES[self.field]
        return valid if self.low is None else replace(valid, low=self.low)


class Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    #: client's names for fields of everlift.messages, for those that have another name in this body
    PARAMS: ClassVar[Mapping[str, str]] = {}

    #: fields of OpenAI's API that must be null or absent, with the reason
    UNSUPPORTED: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def names(cls) -> list[str]:
        """Return the names of all fields as they are written in a body."""
        return [field.alias or name for name, field in cls.model_fields.items()]

    @property
    def params(self) -> Mapping[str, str]:
        """Map names of fields in everlift.messages to the names in this body.

        Only names that differ are included.
        """
        return self.PARAMS

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        """Remove known fields that are null, because null means absent.

        Reading stops after N + 1 members, where N is the number of known fields. Another member
        need not be read: at least one of N + 1 is unknown, and is reported as an error. Raises
        Unsupported if one of the members read is a field that the server does not support, and is
        not null.
        """
        if not isinstance(data, dict):
            return data
        known = {*cls.names(), *cls.UNSUPPORTED}
        read = dict(islice(data.items(), len(known) + 1))
        for name, reason in cls.UNSUPPORTED.items():
            if read.get(name) is not None:
                raise Unsupported(f"{name} is not supported: {reason}", field=name)
        return {
            name: value for name, value in read.items() if value is not None or name not in known
        }


F = TypeVar("F", bound=Fields)


class SharedFields(Fields):
    """Fields that the requests of all APIs for text have under the same names."""

    model: str | None = None
    stream: bool | None = None
    temperature: Annotated[float, InRange("temperature")] | None = None
    top_p: Annotated[float, InRange("top_p")] | None = None
    seed: Annotated[int, InRange("seed")] | None = None

    # Everlift's additions, with vLLM's names where vLLM has the same field.
    top_k: Annotated[int, InRange("top_k")] | None = Field(None, description="0 or -1: no limit")
    min_p: Annotated[float, InRange("min_p")] | None = None
    repetition_penalty: Annotated[float, InRange("repetition_penalty")] | None = None
    priority: Annotated[int, InRange("priority")] | None = Field(
        None, description="a higher class leaves the queue first"
    )
    cache_salt: str | None = None
    timeout_ms: Annotated[int, InRange("timeout_ms")] | None = None
    ttft_target_ms: Annotated[int, InRange("ttft_target_ms")] | None = None
    on_disconnect: Literal["cancel", "grace", "continue"] | None = Field(
        None, description="behaviour of the request when its client disconnects"
    )

    @property
    def shared(self) -> dict[str, Any]:
        """Return the values of the shared fields by name."""
        return {name: getattr(self, name) for name in SharedFields.model_fields}


def parse(kind: type[F], body: Object) -> F:
    """Parse and check the fields of a body.

    Raises UnknownField, and InvalidRequest if a field is missing or invalid.
    """
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False, include_input=False), kind, body) from None


def _refusal(details: Sequence[ErrorDetails], kind: type[Fields], body: Object) -> InvalidRequest:
    """Return the error for the first invalid field.

    An unknown field is reported before others, because it may be a misspelt required field.
    """
    first = next((each for each in details if each["type"] == "extra_forbidden"), details[0])
    is_missing = first["type"] == "missing"
    where = _path(first["loc"][:-1] if is_missing else first["loc"], body)
    if first["type"] == "extra_forbidden":
        is_own = len(first["loc"]) == 1
        hint = did_you_mean(str(first["loc"][0]), kind.names()) if is_own else ""
        return UnknownField(f"unknown field {where!r}{hint}", field=where)
    if is_missing:
        where = f"{where}.{first['loc'][-1]}".removeprefix(".")
        return InvalidRequest(f"{where} is missing", field=where)
    # A field with alternative types has one error for each of them.
    causes = [each["msg"] for each in details if each["loc"][0] == first["loc"][0]]
    return InvalidRequest(f"{where}: {', or '.join(dict.fromkeys(causes))}", field=where)


def _path(location: Iterable[int | str], body: Any) -> str:
    """Return the path of an invalid field, such as ``messages[0].role``.

    ``location`` is the error's location as pydantic reports it. Parts of ``location`` that are not
    in ``body`` are names of alternatives in a union type, and are left out.
    """
    path = ""
    for part in location:
        try:
            body = body[part]
        except (LookupError, TypeError):
            continue
        path += f"[{part}]" if isinstance(part, int) else f".{part[:_MAX_NAME]}"
    return path.removeprefix(".")
