#!/bin/sh
# usage: generate_stubs.sh BIN ROOT OUT PROTO... : Python stubs of the PROTOs, which are imported from ROOT on, into
# OUT, by the tools in BIN.
set -eu
bin=$1 root=$2 out=$3
shift 3
PATH=$bin:$PATH "$bin/python" -m grpc_tools.protoc -I"$root" \
    --python_out="$out" --grpc_python_out="$out" \
    --mypy_out=quiet:"$out" --mypy_grpc_out=quiet:"$out" "$@"
