#!/bin/sh
# Makes a peer's virtual environment: benchmarks/peers/make.sh PYTHON DIRECTORY REQUIREMENTS...
#
# vLLM's documentation asks for libiomp5 and tcmalloc to be preloaded. The former comes with its requirements; the latter
# is taken out of Debian's package, which need not be installed. Elsewhere vLLM runs without it, and the report says so.
set -eu
python=$1 directory=$2
shift 2
torch=$(sed -n 's/^torch==//p' "$1")

rm -rf "$directory"
"$python" -m venv "$directory"
pip="$directory/bin/pip install -q --no-deps"
$pip "torch==$torch" 2>/dev/null || $pip "torch==$torch" --index-url https://download.pytorch.org/whl/cpu
for requirements in "$@"; do
  $pip -r "$requirements"
done

if command -v apt-get >/dev/null; then
  mkdir "$directory/debian"
  (cd "$directory/debian" && apt-get -q download libtcmalloc-minimal4 2>/dev/null && dpkg -x ./*.deb .) &&
    cp -P "$directory"/debian/usr/lib/*/libtcmalloc_minimal.so.4* "$directory/lib/" ||
    echo "no tcmalloc from Debian: vLLM will run without it"
  rm -rf "$directory/debian"
fi
