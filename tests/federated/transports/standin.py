"""A server that remembers what it was told: what transports need to be tried."""

import threading
from contextlib import AbstractContextManager, nullcontext

from arclight.federated.blobs import BlobStore
from arclight.federated.errors import SessionError
from arclight.federated.protocol import Ask, Beat, Close, Evaluated, Join, Message, Receipt, Update, Wait, Welcome


class StandIn:
    """Answers as a server would; asks are held until `wake` is called or their time is up."""

    def __init__(self, blobs: BlobStore) -> None:
        self.blobs = blobs
        self.said: list[Message] = []
        self.sessions: dict[str, str] = {}
        self.held = 0
        self._work = threading.Condition()
        self._awake = False

    def wake(self) -> None:
        with self._work:
            self._awake = True
            self._work.notify_all()

    largest_message = 1 << 30
    run = "run"

    def taking(self, node: str, session: str, digest: str, size: int) -> AbstractContextManager[None]:
        return nullcontext()

    def answer(self, message: Message) -> Message:
        self.said.append(message)
        if isinstance(message, Join):
            session = f"session-of-{message.node}-{len(self.said)}"
            self.sessions[session] = message.node
            return Welcome(session=session, run="run", beat_every=0.5, recipe={"steps": 3})
        if getattr(message, "session", None) not in self.sessions:
            raise SessionError("the server does not know this session: join again")
        if isinstance(message, Ask):
            with self._work:
                self.held += 1
                self._work.notify_all()
                self._work.wait_for(lambda: self._awake, message.wait)
                self.held -= 1
                return Close(why="woken") if self._awake else Wait(seconds=0.0, about="nothing")
        if isinstance(message, Update):
            lost = [blob for blob in message.manifest.blobs if self.blobs.size(blob) is None]
            return Receipt(accepted=not lost, reason="damaged" if lost else None, committed=message.round)
        assert isinstance(message, Beat | Evaluated), message
        return Receipt(accepted=True)

    def wait_until_held(self, count: int, seconds: float = 30.0) -> None:
        with self._work:
            assert self._work.wait_for(lambda: self.held >= count, seconds), f"{self.held} of {count} asks came"
