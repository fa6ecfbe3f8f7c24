"""Print the dependencies of a pyproject.toml and of its extra "traces", one per line.

The image installs them in a layer that does not depend on Everlift's own files, so that the layer
is cached.
"""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path(sys.argv[1]).read_text())["project"]
print(*project["dependencies"], *project["optional-dependencies"]["traces"], sep="\n")
