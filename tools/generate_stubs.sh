#!/bin/sh
# usage: generate_stubs.sh BIN ROOT OUT PROTO...
# Generate Python stubs of the files PROTO in the directory OUT. Imports in these files are relative to ROOT. The tools
# for it are in the directory BIN of a virtual environment.
set -eu
bin=$1 root=$2 out=$3
shift 3
PATH=$bin:$PATH "$bin/python" -m grpc_tools.protoc -I"$root" \
    --python_out="$out" --grpc_python_out="$out" \
    --mypy_out=quiet:"$out" --mypy_grpc_out=quiet:"$out" "$@"
