"""Values as JSON, as clients get it."""

from __future__ import annotations

import json

encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
