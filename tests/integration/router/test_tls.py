"""TLS between all parts: accepted and rejected peers, and certificate renewal at run time."""

import asyncio
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import pytest
from typer.testing import CliRunner

from cluster.cli import app
from cluster.config import Config, load
from cluster.connection import connected
from cluster.errors import ClusterFailed
from cluster.http_api import connected_to_http
from cluster.local.processes import ProcessCluster
from everlift import AsyncClient, Client, Tls, Unreachable
from everlift.errors import SettingsError
from everlift.tls import InternalTls
from everlift.transport import GRPC, TlsTransport, Transport
from everlift.v1 import session_pb2, session_pb2_grpc
from router.config import RouterConfig
from router.router import Router
from tests.support.free_port import free_port
from tests.support.in_process import ROUTER, WORKER, Cluster, KeptLedger, cluster, right_tokens
from tests.support.router.authority import Authority, Pair, Secret
from worker.serving.rank import Rank

PROMPT = [3, 1, 4]


@dataclass(frozen=True)
class Files:
    """Certificates, created once because openssl takes tens of milliseconds for each authority."""

    ours: Authority
    others: Authority
    server: Pair
    client: Pair
    member: Pair

    @property
    def client_tls(self) -> Tls:
        return Tls(str(self.ours.ca), str(self.client.cert), str(self.client.key))

    @property
    def internal(self) -> InternalTls:
        return InternalTls(str(self.ours.ca), str(self.member.cert), str(self.member.key))

    def router(self, *, mutual: bool = False) -> RouterConfig:
        return replace(
            ROUTER,
            tls_cert=str(self.server.cert),
            tls_key=str(self.server.key),
            tls_client_ca=str(self.ours.ca) if mutual else "",
        )


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    directory = tmp_path_factory.mktemp("tls")
    ours, others = Authority(directory / "ours"), Authority(directory / "others")
    member = ours.issue("member", "DNS:everlift")
    return Files(ours, others, ours.issue("server"), ours.issue("client"), member)


async def test_http_commands_check_the_configured_name(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = files.ours.issue("named", "DNS:everlift.models.svc")
    config = replace(ROUTER, tls_cert=str(named.cert), tls_key=str(named.key))
    monkeypatch.setenv("EVERLIFT_TLS_CA", str(files.ours.ca))
    async with cluster(workers=1, router_config=config) as parts:
        for name, is_accepted in (("everlift.models.svc", True), ("another", False)):
            monkeypatch.setenv("EVERLIFT_TLS_NAME", "everlift.models.svc")
            async with connected(parts.address) as client:
                monkeypatch.setenv("EVERLIFT_TLS_NAME", name)
                async with connected_to_http(client, parts.address) as api:
                    with nullcontext() if is_accepted else pytest.raises(Unreachable):
                        assert await api.get("v1/models")


async def tokens(address: str, tls: Tls | None) -> list[int]:
    async with AsyncClient(address, tls=tls, reconnect_s=0.0) as client:
        stream = client.generate(PROMPT, max_tokens=8, temperature=0.0)
        return [token async for chunk in stream for token in chunk.token_ids]


async def reason(address: str, tls: Tls | None) -> str:
    """Return the error of a client that cannot connect."""
    async with AsyncClient(address, tls=tls, retry_s=0) as client:
        with pytest.raises(Unreachable) as refused:
            await client.status()
    return str(refused.value)


# clients and routers


async def test_router_accepts_only_trusted_tls_clients(files: Files) -> None:
    async with cluster(workers=1, router_config=files.router()) as parts:
        trusting = Tls(ca=str(files.ours.ca))
        assert await tokens(parts.address, trusting) == right_tokens(PROMPT, 8)
        assert "may require TLS" in await reason(parts.address, None)
        assert "not signed by a trusted authority" in await reason(
            parts.address, Tls(ca=str(files.others.ca))
        )
        # This name leads to the router, but is not in its certificate.
        address = parts.address.replace("127.0.0.1", "localhost")
        assert "for another name or address" in await reason(address, trusting)
        named = replace(trusting, name="127.0.0.1")
        assert await tokens(address, named) == right_tokens(PROMPT, 8)


@pytest.mark.parametrize("mutual", [False, True])
async def test_http_front_uses_router_certificate(files: Files, mutual: bool) -> None:
    async with cluster(workers=0, router_config=files.router(mutual=mutual)) as parts:
        address = parts.routers[0].http_address
        context = ssl.create_default_context(cafile=str(files.ours.ca))
        if mutual:
            assert await said(address, context) == b""
            context.load_cert_chain(files.client_tls.cert, files.client_tls.key)
        assert (await said(address, context)).startswith(b"HTTP/1.1 200 OK")
        assert not (await said(address, None)).startswith(b"HTTP/1.1 200")


async def said(address: str, context: ssl.SSLContext | None) -> bytes:
    """Return the response to GET /health; empty if the connection is closed."""
    reader, writer = await asyncio.open_connection(*address.split(":"), ssl=context)
    try:
        writer.write(b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        return await reader.read()
    except OSError:
        return b""
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def test_client_certificate_of_other_authority_is_rejected(
    files: Files,
) -> None:
    foreign = files.others.issue("foreign")
    async with cluster(workers=1, router_config=files.router(mutual=True)) as parts:
        assert await tokens(parts.address, files.client_tls) == right_tokens(PROMPT, 8)
        expired = files.ours.issue("expired", days=-1)
        for pair in (foreign, expired):
            tls = Tls(str(files.ours.ca), str(pair.cert), str(pair.key))
            assert "or a client certificate" in await reason(parts.address, tls)
        assert "or a client certificate" in await reason(parts.address, Tls(ca=str(files.ours.ca)))


async def test_client_error_distinguishes_expired_from_plaintext(
    files: Files,
) -> None:
    expired = files.ours.issue("expired", days=-1)
    config = replace(ROUTER, tls_cert=str(expired.cert), tls_key=str(expired.key))
    async with cluster(workers=0, router_config=config) as parts:
        assert "has expired" in await reason(parts.address, Tls(ca=str(files.ours.ca)))
    async with cluster(workers=0) as parts:
        assert "does not use TLS" in await reason(parts.address, Tls(ca=str(files.ours.ca)))


async def test_blocking_client_connects_over_tls(files: Files) -> None:
    async with cluster(workers=1, router_config=files.router(mutual=True)) as parts:

        def ask() -> str:
            with Client(parts.address, tls=files.client_tls) as client:
                return client.status().cluster_id

        assert await asyncio.to_thread(ask)


def test_client_rejects_unreadable_tls_file(files: Files) -> None:
    with pytest.raises(SettingsError, match="/nowhere: cannot be read"):
        AsyncClient("127.0.0.1:1", tls=Tls(ca="/nowhere"))


async def test_stream_continues_during_certificate_renewal(files: Files, tmp_path: Path) -> None:
    secret = Secret(tmp_path / "secret")
    secret.hold(files.server, files.ours.ca)
    config = replace(ROUTER, tls_cert=str(secret.cert), tls_key=str(secret.key))
    async with cluster(workers=1, router_config=config) as parts:
        [held] = parts.hold()
        trusting = Tls(ca=str(files.ours.ca))
        async with AsyncClient(parts.address, tls=trusting) as client:
            stream = client.generate(PROMPT, max_tokens=8, temperature=0.0)
            held.let(2)
            got = [*(await anext(stream)).token_ids]
            assert await asyncio.to_thread(shown, parts.address, files.ours) == "server"
            secret.hold(files.ours.issue("renewed"), files.ours.ca)
            assert await asyncio.to_thread(shown, parts.address, files.ours) == "renewed"
            held.release()
            got += [token async for chunk in stream for token in chunk.token_ids]
        assert got == right_tokens(PROMPT, 8)
        assert await tokens(parts.address, trusting) == right_tokens(PROMPT, 8)


def shown(address: str, authority: Authority) -> str:
    """Return the name in the certificate that a new connection receives."""
    host, _, port = address.rpartition(":")
    context = ssl.create_default_context(cafile=str(authority.ca))
    context.set_alpn_protocols(["h2"])
    with socket.create_connection((host, int(port))) as line:
        with context.wrap_socket(line, server_hostname=host) as connection:
            certificate = connection.getpeercert()
    assert certificate is not None
    return dict(field for [field] in certificate["subject"])["commonName"]


async def test_client_presents_renewed_certificate(files: Files, tmp_path: Path) -> None:
    """The restarted router trusts another authority and rejects the old certificate."""
    theirs, ours = Secret(tmp_path / "theirs"), Secret(tmp_path / "ours")
    theirs.hold(files.server, files.ours.ca)
    ours.hold(files.client, files.ours.ca)
    config = replace(
        ROUTER,
        tls_cert=str(theirs.cert),
        tls_key=str(theirs.key),
        tls_client_ca=str(theirs.ca),
        port=free_port(),
    )
    async with cluster(workers=0, router_config=config) as parts:
        tls = Tls(str(ours.ca), str(ours.cert), str(ours.key))
        async with AsyncClient(parts.address, tls=tls, retry_s=0) as client:
            await client.status()
            theirs.hold(files.server, files.others.ca)
            # Open connections stay open.
            await client.status()
            await start_again(parts)
            with pytest.raises(Unreachable, match="connection closed during the handshake"):
                await client.status()
            ours.hold(files.others.issue("client"), files.ours.ca)
            await client.status()


async def start_again(parts: Cluster) -> None:
    """Restart the router at its address."""
    await parts.kill_router(parts.routers[0])
    await parts.add_router()


# internal connections


@asynccontextmanager
async def closed_cluster(internal: InternalTls, routers: int = 1) -> AsyncIterator[Cluster]:
    router, worker = (replace(each, internal_tls=internal) for each in (ROUTER, WORKER))
    async with cluster(routers, 1, router, worker) as parts:
        yield parts


async def test_routers_and_workers_connect_over_mutual_tls(files: Files) -> None:
    async with closed_cluster(files.internal, routers=2) as parts:
        for router in parts.routers:
            assert await tokens(router.address, None) == right_tokens(PROMPT, 8)


def strangers(files: Files) -> dict[str, Transport]:
    foreign = files.others.issue("foreign", "DNS:everlift")
    return {
        "plain": GRPC,
        "without a certificate": TlsTransport(Tls(ca=str(files.ours.ca), name="everlift")),
        "of another authority": TlsTransport(
            Tls(str(files.ours.ca), str(foreign.cert), str(foreign.key), "everlift")
        ),
        "that trusts another one": TlsTransport(
            Tls(str(files.others.ca), str(files.member.cert), str(files.member.key), "everlift")
        ),
        "that looks for another name": TlsTransport(replace(files.internal, name="elsewhere").tls),
    }


async def test_internal_ports_reject_foreign_certificates(files: Files) -> None:
    async with closed_cluster(files.internal) as parts:
        router = parts.routers[0].internal_address
        worker = parts.routers[0]._sessions.links[0].info.address
        for who, transport in strangers(files).items():
            assert await is_refused_by_router(router, transport), who
            assert await is_refused_by_worker(worker, transport), who
        member = TlsTransport(files.internal.tls)
        assert not await is_refused_by_router(router, member)
        assert not await is_refused_by_worker(worker, member)


async def is_refused_by_router(address: str, transport: Transport) -> bool:
    async with AsyncClient(address, transport=transport, retry_s=0) as client:
        try:
            await client.status()
        except Unreachable:
            return True
    return False


async def is_refused_by_worker(address: str, transport: Transport) -> bool:
    async def frames() -> AsyncIterator[session_pb2.RouterFrame]:
        yield session_pb2.RouterFrame(hello=session_pb2.RouterHello(router_id="stranger"))
        await asyncio.Event().wait()

    async with transport.channel(address) as channel:
        stub: session_pb2_grpc.WorkerSessionAsyncStub = session_pb2_grpc.WorkerSessionStub(channel)
        try:
            await anext(aiter(stub.Connect(frames())))
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            return True
    return False


async def test_internal_tls_rotates_authority_without_outage(files: Files, tmp_path: Path) -> None:
    """Steps: trust both authorities, change the certificates, remove the old authority."""
    secret = Secret(tmp_path / "secret")
    both = tmp_path / "both.crt"
    both.write_bytes(files.ours.ca.read_bytes() + files.others.ca.read_bytes())
    renewed = files.others.issue("renewed", "DNS:everlift")
    secret.hold(files.member, files.ours.ca)
    internal = InternalTls(str(secret.ca), str(secret.cert), str(secret.key))
    async with closed_cluster(internal) as parts:
        for pair, ca in ((files.member, both), (renewed, both), (renewed, files.others.ca)):
            secret.hold(pair, ca)
            # A new worker must connect with the routers that run already.
            await parts.add_worker()
            await parts.kill_worker(parts.workers[0])
            assert await tokens(parts.address, None) == right_tokens(PROMPT, 8)
        old = TlsTransport(files.internal.tls)
        assert await is_refused_by_router(parts.routers[0].internal_address, old)


@pytest.mark.parametrize("name", ["tls_cert", "tls_client_ca", "internal_tls"])
async def test_router_with_invalid_tls_files_fails_to_start(
    files: Files, tmp_path: Path, name: str
) -> None:
    bad = tmp_path / "bad.pem"
    bad.write_text("no PEM")
    config = {
        "tls_cert": replace(files.router(), tls_cert=str(bad)),
        "tls_client_ca": replace(files.router(), tls_client_ca=str(bad)),
        "internal_tls": replace(ROUTER, internal_tls=replace(files.internal, ca=str(bad))),
    }[name]
    with pytest.raises(SettingsError, match=f"{bad}: must hold certificates in PEM"):
        await Router.start(config, KeptLedger(asyncio.get_running_loop().time))


async def test_worker_with_invalid_tls_files_fails_to_start(files: Files) -> None:
    internal = replace(files.internal, key=str(files.client.key))
    rank = Rank(replace(WORKER, internal_tls=internal))
    with pytest.raises(SettingsError, match=r"client\.key: must hold"):
        await rank.start()
    await rank.stop()


def made(directory: Path) -> tuple[RouterConfig, InternalTls, Tls]:
    """Run deploy/certificates.sh; return its files for router, internal connections and client."""
    script = [*("bash", CERTIFICATES, directory), "IP:127.0.0.1,DNS:llm.example", "alice"]
    subprocess.run(script, check=True, capture_output=True)

    def files(name: str) -> tuple[str, str, str]:
        ca, cert, key = (str(directory / name / each) for each in ("ca.crt", "tls.crt", "tls.key"))
        return ca, cert, key

    ca, cert, key = files("router")
    router = replace(ROUTER, tls_cert=cert, tls_key=key, tls_client_ca=ca)
    return router, InternalTls(*files("internal")), Tls(*files("client-alice"))


CERTIFICATES = Path(__file__).parents[3] / "deploy" / "certificates.sh"


async def test_certificate_script_output_is_accepted_and_renewed(tmp_path: Path) -> None:
    router, internal, client = made(tmp_path)
    router = replace(router, internal_tls=internal)
    # Python 3.13 and newer set these flags by default.
    strict = ssl.create_default_context(cafile=client.ca)
    strict.verify_flags |= ssl.VERIFY_X509_STRICT | ssl.VERIFY_X509_PARTIAL_CHAIN
    strict.load_cert_chain(client.cert, client.key)
    async with cluster(1, 1, router, replace(WORKER, internal_tls=internal)) as parts:
        http_address = parts.routers[0].http_address
        assert (await said(http_address, strict)).startswith(b"HTTP/1.1 200 OK")
        assert await tokens(parts.address, client) == right_tokens(PROMPT, 8)
        before = Path(client.cert).read_bytes()
        assert made(tmp_path)[2] == client
        assert Path(client.cert).read_bytes() != before
        await parts.add_worker()
        await parts.kill_worker(parts.workers[0])
        assert await tokens(parts.address, client) == right_tokens(PROMPT, 8)


# a whole cluster


def settings_of(files: Files, state_dir: Path, *more: str) -> Config:
    router = files.router(mutual=True)
    return load(
        None,
        {},
        [
            "model=fake",
            "router.port=0",
            "router.http_port=0",
            "router.drain=0.2",
            f"state_dir={state_dir}",
            *(
                f"router.{name}={getattr(router, name)}"
                for name in ("tls_cert", "tls_key", "tls_client_ca")
            ),
            *(
                f"internal_tls.{name}={getattr(files.internal, name)}"
                for name in ("ca", "cert", "key")
            ),
            *more,
        ],
    )


async def command(*arguments: str, **environ: str) -> tuple[int, str, str]:
    """Return exit status, standard output and standard error of ``everlift``."""
    result = await asyncio.to_thread(CliRunner().invoke, app, arguments, env=environ)
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.long
async def test_cli_commands_reach_cluster_over_tls(files: Files, tmp_path: Path) -> None:
    config = settings_of(
        files, tmp_path, "num_routers=2", "num_workers=2", "worker.tensor_parallel=2"
    )
    tls = files.client_tls
    trusting = {"EVERLIFT_TLS_CA": tls.ca}
    known = trusting | {"EVERLIFT_TLS_CERT": tls.cert, "EVERLIFT_TLS_KEY": tls.key}
    text = ("generate", "x", "--max-tokens", "5", "--temperature", "0", "--request-id", "r")
    async with ProcessCluster(config) as cluster:
        here = {"EVERLIFT_ADDRESS": ",".join(cluster.addresses)}
        code, out, err = await command(*text, **here, **known)
        assert code == 0 and out.strip(), err
        assert await command("attach", "r", **here, **known) == (0, out, "")
        assert (await command("status", **here, **known))[0] == 0
        drain = ("drain", cluster.workers[0].worker_id, "--wait")
        assert (await command(*drain, **here, **known))[1].endswith("has no requests left\n")
        assert await command("forget", "r", **here, **known) == (0, "forgotten\n", "")
        code, out, err = await command(*text, **here, **trusting)
        assert (code, out) == (1, "")
        assert "may require TLS or a client certificate" in err
        half = trusting | {"EVERLIFT_TLS_CERT": tls.cert}
        code, out, err = await command(*text, **here, **half)
        assert "EVERLIFT_TLS_CERT must be set together with EVERLIFT_TLS_KEY" in err


async def test_cluster_start_names_unreadable_tls_file(files: Files, tmp_path: Path) -> None:
    for setting in ("router.tls_cert", "internal_tls.ca"):
        with pytest.raises((ClusterFailed, SettingsError), match="/nowhere: cannot be read"):
            await ProcessCluster(settings_of(files, tmp_path, f"{setting}=/nowhere")).start()


def test_internal_tls_is_set_cluster_wide(files: Files, tmp_path: Path) -> None:
    config = settings_of(files, tmp_path)
    assert config.router.internal_tls == config.worker.internal_tls == files.internal
    with pytest.raises(SettingsError, match="internal_tls must be set for the whole cluster"):
        settings_of(files, tmp_path, "worker.internal_tls.name=other")
