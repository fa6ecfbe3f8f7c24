"""Print the dependencies of a pyproject.toml and of its extra "traces", one a line.

The image installs them in a layer that holds none of our own files.
"""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path(sys.argv[1]).read_text())["project"]
print(*project["dependencies"], *project["optional-dependencies"]["traces"], sep="\n")
