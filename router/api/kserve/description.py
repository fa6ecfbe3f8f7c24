"""Metadata of the served model in KServe's protocol: version, inputs and outputs. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from everlift.errors import UnknownModel
from router.api.kserve import infer_request, infer_response, parameters
from router.api.kserve.v2 import open_inference_pb2 as pb

#: The only version of the served model. Requests for other versions are rejected.
VERSION = "1"
#: Supported extensions of the protocol. Of schedule_policy, only priority and timeout have effect.
EXTENSIONS = ("model_configuration", "schedule_policy", "statistics")
_PLATFORM = "everlift"
_ANY_LENGTH = -1


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    datatype: str
    dims: int = _ANY_LENGTH

    @property
    def data_type(self) -> pb.DataType.ValueType:
        """Return the datatype as an enum value of the message ModelConfig."""
        return pb.DataType.Value(f"TYPE_{self.datatype.replace('BYTES', 'STRING')}")


def _inputs() -> Iterator[_Tensor]:
    yield _Tensor(infer_request.TEXT_INPUT, "BYTES", 1)
    yield from (_Tensor(name, "INT32") for name in infer_request.TOKEN_INPUTS)
    yield _Tensor(parameters.NESTED, "BYTES", 1)
    for parameter in parameters.PARAMETERS:
        for name in parameter.names:
            yield _Tensor(name, parameter.datatype, parameter.dims)


_INPUTS = tuple(_inputs())
_OUTPUTS = tuple(_Tensor(output.name, output.datatype) for output in infer_response.OUTPUTS)


def check_version(served: str, version: str) -> None:
    """Check that ``version`` is empty or the model's only version. Raises UnknownModel if not.

    ``served`` is the model's name.
    """
    if version not in ("", VERSION):
        raise UnknownModel(f"the model {served!r} has only the version {VERSION}, not {version!r}")


def metadata(served: str) -> pb.ModelMetadataResponse:
    return pb.ModelMetadataResponse(
        name=served,
        versions=[VERSION],
        platform=_PLATFORM,
        inputs=map(_metadata, _INPUTS),
        outputs=map(_metadata, _OUTPUTS),
    )


def _metadata(tensor: _Tensor) -> pb.ModelMetadataResponse.TensorMetadata:
    return pb.ModelMetadataResponse.TensorMetadata(
        name=tensor.name, datatype=tensor.datatype, shape=[tensor.dims]
    )


def config(served: str) -> pb.ModelConfig:
    return pb.ModelConfig(
        name=served,
        platform=_PLATFORM,
        backend=_PLATFORM,
        input=[
            pb.ModelInput(
                name=tensor.name, data_type=tensor.data_type, dims=[tensor.dims], optional=True
            )
            for tensor in _INPUTS
        ],
        output=[
            pb.ModelOutput(name=tensor.name, data_type=tensor.data_type, dims=[tensor.dims])
            for tensor in _OUTPUTS
        ],
        model_transaction_policy=pb.ModelTransactionPolicy(decoupled=True),
    )
