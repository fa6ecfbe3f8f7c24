#!/bin/sh
# usage: build_image.sh cuda|cpu [OPTION...]
# Build the image everlift:VERSION (for CPUs everlift:VERSION-cpu) with docker or buildah. OPTIONs are passed on to the
# build command, for example --build-arg BASE=registry.example/python:3.11-slim.
set -eu
variant=$1
shift
cd "$(dirname "$0")/.."
version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
tag=everlift:$version
[ "$variant" = cuda ] || tag=$tag-$variant
if command -v docker >/dev/null && docker info >/dev/null 2>&1; then
    build="docker build"
elif command -v buildah >/dev/null; then
    build="buildah build --layers --format docker"
else
    echo "found neither a running docker nor buildah: install one of them" >&2
    exit 1
fi
revision=$(git rev-parse HEAD 2>/dev/null || true)
$build --file deploy/Dockerfile --tag "$tag" --build-arg VARIANT="$variant" --build-arg VERSION="$version" \
    --build-arg REVISION="$revision" --build-arg CREATED="$(date -u +%Y-%m-%dT%H:%M:%SZ)" "$@" .
echo "built $tag"
