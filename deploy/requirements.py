"""The dependencies of a pyproject.toml, a line each: a layer of the image without our own files."""

import sys
import tomllib
from pathlib import Path

print(*tomllib.loads(Path(sys.argv[1]).read_text())["project"]["dependencies"], sep="\n")
