"""The dependencies of a pyproject.toml and of its extra "traces", a line each: a layer of the image
without our own files."""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path(sys.argv[1]).read_text())["project"]
print(*project["dependencies"], *project["optional-dependencies"]["traces"], sep="\n")
