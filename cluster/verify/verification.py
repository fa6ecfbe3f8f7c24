"""Verification of an endpoint: undisturbed streams, broken connections, killed processes."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.errors import VerificationFailed
from cluster.verify.endpoint import Endpoint, Received
from cluster.verify.verdict import Verdict, verdict

#: Maximum number of seconds until the endpoint answers again after a kill.
_RECOVERY_S = 180.0
_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Probe:
    """Chat whose output must not depend on disturbances."""

    name: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """Disturbance, and the number of streams with each verdict."""

    name: str
    verdicts: dict[str, int]

    @property
    def is_exact(self) -> bool:
        return not any(number for name, number in self.verdicts.items() if name != "exact")


def probes(number: int, fields: Mapping[str, Any]) -> list[Probe]:
    """Return ``number`` chats with the given fields; the second half is sampled with a seed."""
    found = []
    for index in range(number):
        text = f"count from {index + 3} to {index + 400}:"
        body: dict[str, Any] = {
            **fields,
            "messages": [{"role": "user", "content": text}],
            "temperature": 0.0,
        }
        is_seeded = index >= number // 2
        if is_seeded:
            body |= {"temperature": 1.0, "seed": index}
        found.append(Probe(f"{'seeded' if is_seeded else 'greedy'} {index}", body))
    return found


class Verification:
    """Verification of ``endpoint`` with ``chats``.

    ``expected`` has the undisturbed output of each chat, by the name of the chat.
    """

    def __init__(self, endpoint: Endpoint, chats: Sequence[Probe]) -> None:
        self._endpoint = endpoint
        self._probes = list(chats)
        self.expected: dict[str, str] = {}

    async def undisturbed(self) -> Case:
        """Read all streams twice, and keep the chats whose output is the same both times.

        Chats with empty outputs are not kept. The case counts the verdicts on the second outputs,
        compared with the first ones. Raises VerificationFailed if a stream fails, or if no chat is
        left.
        """
        first, second = await self._read_all(), await self._read_all()
        for received in (*first.values(), *second.values()):
            if received.error:
                raise VerificationFailed(f"an undisturbed stream failed: {received.error}")
        verdicts = [verdict(first[name].text, second[name].text) for name in first]
        self.expected = {
            name: received.text
            for name, received in first.items()
            if received.text and received.text == second[name].text
        }
        self._probes = [probe for probe in self._probes if probe.name in self.expected]
        if not self._probes:
            raise VerificationFailed("no output is the same twice, so none can be verified")
        return _case("undisturbed", verdicts)

    async def broken_connection(self, at: int) -> Case:
        """Break each connection after ``at`` pieces, and send the request again.

        The second request has the same idempotency key and, if the endpoint sends event ids, the id
        of the last event received. An endpoint without event ids cannot continue the output: it
        starts the request again. Streams that finish before ``at`` pieces are left out. A stream
        that fails before ``at`` pieces is not requested again, and its output so far is judged.
        Raises VerificationFailed if no stream is left.
        """

        async def read(probe: Probe) -> Verdict | None:
            key, received = secrets.token_hex(8), Received()
            await self._endpoint.read(probe.body, key, received, at)
            if received.is_finished:
                return None
            if not received.error:
                await self._endpoint.read(probe.body, key, received)
            return verdict(self.expected[probe.name], received.text)

        verdicts = await asyncio.gather(*map(read, self._probes))
        return _case(f"broken at piece {at}", [each for each in verdicts if each is not None])

    async def killed(self, command: str, at: int) -> Case:
        """Run a shell command as soon as half of the streams have at least ``at`` pieces.

        The command also runs if all streams end before that. Streams that are complete when the
        command ends are left out. Raises VerificationFailed if the command fails, if no stream is
        left, or if the endpoint does not answer afterwards.
        """
        streams = {probe.name: Received() for probe in self._probes}
        is_due = asyncio.Event()

        def check() -> None:
            if sum(it.num_pieces >= at for it in streams.values()) * 2 >= len(streams):
                is_due.set()

        for received in streams.values():
            received.on_piece = check
        reading = asyncio.create_task(self._read_all(streams))
        waiting = asyncio.create_task(is_due.wait())
        await asyncio.wait((reading, waiting), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        try:
            await _run(command)
        except BaseException:
            reading.cancel()
            raise
        disturbed = [name for name, it in streams.items() if not it.is_finished]
        await reading
        verdicts = [verdict(self.expected[name], streams[name].text) for name in disturbed]
        await self._recovered()
        return _case(f"killed at piece {at}", verdicts)

    async def _read_all(self, streams: dict[str, Received] | None = None) -> dict[str, Received]:
        streams = streams or {probe.name: Received() for probe in self._probes}
        await asyncio.gather(
            *(
                self._endpoint.read(probe.body, secrets.token_hex(8), streams[probe.name])
                for probe in self._probes
            )
        )
        return streams

    async def _recovered(self) -> None:
        """Wait until the endpoint answers a chat completely.

        Raises VerificationFailed if no chat is answered completely within ``_RECOVERY_S`` seconds.
        """
        probe = self._probes[0]
        try:
            async with asyncio.timeout(_RECOVERY_S):
                while True:
                    received = Received()
                    await self._endpoint.read(probe.body, secrets.token_hex(8), received)
                    if received.is_finished:
                        return
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise VerificationFailed(
                f"the endpoint did not answer within {_RECOVERY_S:g} s after the kill"
            ) from None


async def _run(command: str) -> None:
    process = await asyncio.create_subprocess_shell(command)
    if status := await process.wait():
        raise VerificationFailed(f"{command!r} ended with status {status}")


def _case(name: str, verdicts: Sequence[Verdict]) -> Case:
    """Return the case ``name`` with the number of streams per verdict.

    ``verdicts`` has one verdict per stream. Raises VerificationFailed if it is empty.
    """
    if not verdicts:
        raise VerificationFailed(
            f"{name}: every stream had ended before: raise --max-tokens, or add a field to --body "
            "that makes outputs longer"
        )
    found = Counter(verdicts)
    return Case(name, {each.value: found[each] for each in Verdict})
