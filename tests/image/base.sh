#!/bin/sh
# usage: base.sh DIRECTORY
# Make the root directory of a base image with Python from Debian's packages, instead of python:*-slim.
set -eu
debootstrap --variant=minbase \
    --include=python3,python3-pip,python3-venv,ca-certificates,libgomp1 bookworm "$1" >"$1.log" 2>&1 || {
    tail -5 "$1.log" >&2
    exit 1
}
# As in python:*-slim, there is a command python, and pip installs into /usr/local.
ln -s python3 "$1/usr/bin/python"
rm -f "$1"/usr/lib/python3*/EXTERNALLY-MANAGED
rm -rf "$1"/var/cache/apt/archives/*.deb "$1"/var/lib/apt/lists/*
