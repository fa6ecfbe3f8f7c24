#!/bin/sh
# usage: generate_stubs.sh BIN OUT PROTO... : Python stubs of the PROTOs into OUT, by the tools in BIN.
set -eu
bin=$1 out=$2
shift 2
PATH=$bin:$PATH "$bin/python" -m grpc_tools.protoc -Iproto \
    --python_out="$out" --grpc_python_out="$out" \
    --mypy_out=quiet:"$out" --mypy_grpc_out=quiet:"$out" "$@"
