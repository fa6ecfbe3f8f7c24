"""Certificate files: errors that name the cause, and reloads of changed files."""

import asyncio
import logging
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from everlift import certificates
from everlift.errors import SettingsError
from everlift.reloaded import Reloaded
from everlift.tls import InternalTls, Tls
from router.config import RouterConfig
from tests.support.router.authority import Authority, Pair, Secret


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def pair(ours: Authority) -> Pair:
    return ours.issue("server")


def tls_of(pair: Pair, ca: Path | str = "") -> Tls:
    return Tls(str(ca), str(pair.cert), str(pair.key))


def test_tls_config_rejects_incomplete_pair() -> None:
    with pytest.raises(ValueError, match="cert must be set together with key"):
        Tls(cert="a")
    with pytest.raises(ValueError, match="tls_cert must be set together with tls_key"):
        RouterConfig(tls_key="a")
    with pytest.raises(ValueError, match="tls_client_ca must be set together with tls_cert"):
        RouterConfig(tls_client_ca="a")
    with pytest.raises(ValueError, match="ca, cert and key must be set together"):
        InternalTls(cert="a", key="b")


def test_tls_paths_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Tls("ca", "cert", "key").files == tuple(
        str(tmp_path / name) for name in ("ca", "cert", "key")
    )
    assert RouterConfig(tls_cert="c", tls_key="k").tls == Tls(cert="c", key="k")
    assert RouterConfig().tls is None


@pytest.mark.parametrize("what", ["missing", "directory", "text", "half", "key", "other's key"])
def test_tls_error_names_unusable_file(
    ours: Authority, pair: Pair, tmp_path: Path, what: str
) -> None:
    bad = tmp_path / "bad.pem"
    whole = pair.cert.read_bytes()
    contents = {"text": b"no PEM", "half": whole[: len(whole) // 2], "key": pair.key.read_bytes()}
    if what == "directory":
        bad.mkdir()
    elif what in contents:
        bad.write_bytes(contents[what])
    files = [Tls(ca=str(bad)), Tls(cert=str(bad), key=str(pair.key))]
    if what != "key":
        files.append(Tls(cert=str(pair.cert), key=str(bad)))
    if what == "other's key":
        bad.write_bytes(ours.issue("other").key.read_bytes())
        files = files[2:]
    for tls in files:
        for make in (certificates.pem, certificates.client_context):
            with pytest.raises(SettingsError, match=f"^{bad}: (must hold|cannot be read)"):
                make(tls)


def test_encrypted_key_is_rejected_without_prompt(pair: Pair, tmp_path: Path) -> None:
    locked = tmp_path / "locked.key"
    command = f"openssl ec -in {pair.key} -aes256 -passout pass:secret -out {locked}"
    subprocess.run(command.split(), check=True, capture_output=True)
    with pytest.raises(SettingsError, match="unencrypted"):
        certificates.pem(tls_of(Pair(pair.cert, locked)))


def test_pem_repr_hides_private_key(pair: Pair) -> None:
    shown = repr(certificates.pem(tls_of(pair)).current())
    assert "CERTIFICATE" in shown
    assert "PRIVATE" not in shown


def test_pem_reloads_rotated_secret_files_together(ours: Authority, tmp_path: Path) -> None:
    secret = Secret(tmp_path / "secret")
    first, second = ours.issue("first"), ours.issue("second")
    secret.hold(first, ours.ca)
    files = certificates.pem(Tls(str(secret.ca), str(secret.cert), str(secret.key)))
    before = files.current()
    assert files.current() is before
    secret.hold(second, ours.ca)
    after = files.current()
    assert (after.cert, after.key) == (second.cert.read_bytes(), second.key.read_bytes())
    assert files.current() is after


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.INFO, "everlift.reloaded")
    return lambda: [record.levelname for record in caplog.records]


def test_pem_ignores_partial_update_and_logs_it_once(
    ours: Authority, pair: Pair, tmp_path: Path, said: Callable[[], list[str]]
) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    cert.write_bytes(pair.cert.read_bytes())
    key.write_bytes(pair.key.read_bytes())
    files = certificates.pem(tls_of(Pair(cert, key)))
    before, new = files.current(), ours.issue("new")
    whole = new.cert.read_bytes()
    cert.write_bytes(whole[: len(whole) // 2])
    assert files.current() is files.current() is before
    assert said() == ["ERROR"]
    # The certificate is complete now, but the key is still the old one.
    cert.write_bytes(whole)
    assert files.current() is files.current() is before
    assert said() == ["ERROR", "ERROR"]
    key.unlink()
    assert files.current() is before
    assert said() == ["ERROR"] * 3
    key.write_bytes(new.key.read_bytes())
    assert files.current().cert == whole
    assert said() == ["ERROR"] * 3 + ["INFO"]


def test_reloaded_rereads_file_changed_during_read(tmp_path: Path) -> None:
    file, left = tmp_path / "file", 2

    def read() -> str:
        nonlocal left
        text = file.read_text()
        if left:
            left -= 1
            file.write_text(f"{text}+")
        return text

    file.write_text("a")
    assert Reloaded([str(file)], read).current() == "a++"
    left = 100
    with pytest.raises(SettingsError, match="changes while it is being read"):
        Reloaded([str(file)], read)


@asynccontextmanager
async def greeting(context: ssl.SSLContext) -> AsyncIterator[int]:
    """Run a TLS server that greets each client; yield its port."""

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        await reader.read()
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def names(port: int, tls: Tls, protocols: tuple[str, ...] = ()) -> tuple[str, str | None]:
    """Return the server's name and the negotiated protocol; raises OSError."""
    context = certificates.client_context(tls).current()
    if protocols:
        context.set_alpn_protocols(protocols)
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        # The server accepts or rejects a client certificate only after the handshake.
        if await reader.read(5) != b"hello":
            raise ConnectionResetError
        shown = writer.get_extra_info("peercert")
        protocol = writer.get_extra_info("ssl_object").selected_alpn_protocol()
        return shown["subject"][0][0][1], protocol
    finally:
        writer.close()
        try:
            await writer.wait_closed()
        except OSError:
            pass


async def test_server_context_presents_renewed_certificate(ours: Authority, tmp_path: Path) -> None:
    secret = Secret(tmp_path / "secret")
    secret.hold(ours.issue("first"), ours.ca)
    trusting = Tls(ca=str(ours.ca))
    context = certificates.server_context(tls_of(Pair(secret.cert, secret.key)), ["h2", "http/1.1"])
    async with greeting(context) as port:
        assert await names(port, trusting, ("http/1.1",)) == ("first", "http/1.1")
        secret.hold(ours.issue("second"), ours.ca)
        assert await names(port, trusting, ("h2", "http/1.1")) == ("second", "h2")


async def test_server_context_reloads_client_authority(ours: Authority, tmp_path: Path) -> None:
    others = Authority(tmp_path / "others")
    us, them = (tls_of(each.issue("client"), ours.ca) for each in (ours, others))
    secret, server = Secret(tmp_path / "secret"), ours.issue("server")
    secret.hold(server, ours.ca)
    tls = Tls(str(secret.ca), str(secret.cert), str(secret.key))
    async with greeting(certificates.server_context(tls)) as port:
        assert await names(port, us) == ("server", None)
        for refused in (them, Tls(ca=str(ours.ca))):
            with pytest.raises(OSError):
                await names(port, refused)
        secret.hold(server, others.ca)
        assert await names(port, them) == ("server", None)
        with pytest.raises(OSError):
            await names(port, us)
