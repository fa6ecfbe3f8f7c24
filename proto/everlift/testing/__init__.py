"""Fake router for tests, with answers from a function and scripted faults.

With FakeTransport, the router is in the same process and needs no socket.

>>> transport = FakeTransport(faults=[Break(3), Refuse(RouterStopping())])
>>> async with AsyncClient("fake", transport=transport) as client:
...     await client.generate("one two three four").text()
'one two three four'
>>> transport.router.calls
['Generate', 'Attach 3', 'Attach 3']

>>> async with FakeRouter(faults=[Break(3)]) as router:
...     async with AsyncClient(router.address) as client:
...         await client.generate("one two three four").text()
'one two three four'
"""

from everlift.testing.faults import (
    Break,
    BreakOff,
    Fault,
    Hold,
    Overlap,
    Refuse,
    Repeat,
    Skip,
)
from everlift.testing.request import Answer, FakeRequest, Output, words
from everlift.testing.router import FakeRouter
from everlift.testing.transport import FakeTransport

__all__ = [
    "Answer",
    "Break",
    "BreakOff",
    "FakeRequest",
    "FakeRouter",
    "FakeTransport",
    "Fault",
    "Hold",
    "Output",
    "Overlap",
    "Refuse",
    "Repeat",
    "Skip",
    "words",
]
