"""Calls of Serve's REST API, which KubeRay uses."""

from __future__ import annotations

import json
import urllib.request
from typing import Any


def call(url: str, body: object = None) -> Any:
    """Return the JSON answer to a GET of ``url``, or to a PUT if there is a ``body``."""
    # When a process starts a Ray cluster and ~/.ray/auth_token exists, Ray turns on token
    # authentication for it (RAY_AUTH_MODE).
    from ray._private.authentication.http_token_authentication import (
        get_auth_headers_if_auth_enabled,
    )

    headers = {"Content-Type": "application/json", **get_auth_headers_if_auth_enabled({})}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, headers, method="GET" if data is None else "PUT")
    with urllib.request.urlopen(request, timeout=30) as response:
        text = response.read()
    return json.loads(text) if text else None
