"""Certificates for tests, created by openssl, and a directory of them as Kubernetes mounts it."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.support.ledger.ledgers import found

_KEY = "-newkey ec -pkeyopt ec_paramgen_curve:P-256"


@dataclass(frozen=True, slots=True)
class Pair:
    cert: Path
    key: Path


class Authority:
    """Certificate authority; ``ca`` is its own certificate."""

    def __init__(self, directory: Path) -> None:
        found("openssl")
        directory.mkdir()
        self._directory = directory
        self.ca, self._key = directory / "ca.crt", directory / "ca.key"
        subject = f"-subj /CN={directory.name}"
        _openssl(f"req -x509 {_KEY} -nodes -days 2 {subject} -keyout {self._key} -out {self.ca}")

    def issue(self, name: str, names: str = "IP:127.0.0.1", days: int = 2) -> Pair:
        """Issue a certificate for ``names``, a subjectAltName of openssl; -1 days: expired."""
        cert, key = self._directory / f"{name}.crt", self._directory / f"{name}.key"
        request, extensions = cert.with_suffix(".csr"), cert.with_suffix(".ext")
        extensions.write_text(f"subjectAltName={names}")
        _openssl(f"req {_KEY} -nodes -subj /CN={name} -keyout {key} -out {request}")
        signing = f"-CA {self.ca} -CAkey {self._key} -CAcreateserial -days {days}"
        _openssl(f"x509 -req -in {request} {signing} -extfile {extensions} -out {cert}")
        return Pair(cert, key)


class Secret:
    """Directory as the kubelet maintains it for a Secret of type kubernetes.io/tls.

    All files change at once, because they lead through one symbolic link.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self._directory = directory
        self._count = 0
        self.cert, self.key = directory / "tls.crt", directory / "tls.key"
        self.ca = directory / "ca.crt"
        for path in (self.cert, self.key, self.ca):
            path.symlink_to(f"..data/{path.name}")

    def hold(self, pair: Pair, ca: Path) -> None:
        self._count += 1
        version = self._directory / f"..version{self._count}"
        version.mkdir()
        for name, source in (("tls.crt", pair.cert), ("tls.key", pair.key), ("ca.crt", ca)):
            (version / name).write_bytes(source.read_bytes())
        link = self._directory / "..data_tmp"
        link.symlink_to(version.name)
        os.replace(link, self._directory / "..data")


def _openssl(command: str) -> None:
    subprocess.run(["openssl", *command.split()], check=True, capture_output=True)
