"""A mesh of Unix sockets among the ranks of one group on one host: descriptors, faults and deaths travel over it.

Every pair of ranks keeps one ``SOCK_SEQPACKET`` connection, so that a message is one frame and several threads may
send. One daemon thread per link reads them all: it answers handshakes while the mesh is built, then watches for
parcels, faults, goodbyes and deaths. A peer that ends without a goodbye is dead; one that is merely stopped keeps its
sockets and is not.
"""

from __future__ import annotations

import array
import contextlib
import hashlib
import hmac
import logging
import os
import secrets
import select
import selectors
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence

from ..contract import Rendezvous
from ..errors import FAULT_NBYTES, CommAborted, CommBackendError, CommTimeout, PeerDied, Unavailable, unpack_fault

__all__ = ["PARCEL_FDS", "PARCEL_NBYTES", "HostLink"]

log = logging.getLogger("commbackend")

#: Longest payload and most descriptors of one ``exchange_fds``.
PARCEL_NBYTES, PARCEL_FDS = 32768, 64

_PARCEL, _FAULT, _BYE = 1, 2, 3
_FRAME = struct.Struct("<4sBxHQ")  # magic, kind, descriptors, number of the exchange
_FRAME_MAGIC = b"cbL1"
_HELLO = struct.Struct("<4sii32s")  # magic, from, to, digest
_HELLO_MAGIC = b"cbH1"
# Strangers that connected and have said nothing yet; more than this and the oldest is dropped.
_PENDING = 64
_CREDENTIALS = struct.Struct("iII")

FaultCallback = Callable[[int, CommBackendError | None], None]


class HostLink:
    """One rank's end of the mesh. Made by ``open``; ``close`` leaves no thread, descriptor or name behind."""

    def __init__(self, group: Rendezvous) -> None:
        self.rank, self.size = group.rank, group.size
        self._token = group.token
        self._pid = os.getpid()
        self._name = b"\0commbackend-" + secrets.token_hex(16).encode()
        self._news = threading.Condition()
        self._exchanging = threading.Lock()
        self._exchanges = 0
        self._parcels: dict[tuple[int, int], tuple[bytes, list[int], bool]] = {}
        self._peers: dict[int, socket.socket] = {}
        self._pidfds: dict[int, int] = {}
        self._gone: dict[int, str] = {}
        self._missed: list[tuple[int, CommBackendError | None]] = []
        self._callback: FaultCallback | None = None
        self._broken: CommBackendError | None = None
        self._closed = self._ending = False
        self._selector = selectors.DefaultSelector()
        self._todo: deque[Callable[[], None]] = deque()
        self._bell, self._ear = socket.socketpair()
        self._strangers: deque[socket.socket] = deque()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for sock in (self._bell, self._ear, self._listener):
            sock.setblocking(False)
        self._selector.register(self._ear.fileno(), selectors.EVENT_READ, self._wake)
        self._watcher = threading.Thread(target=self._watch, name=f"commbackend-link-{self.rank}", daemon=True)
        _LINKS.add(self)

    # -- building the mesh -------------------------------------------------------------------------------------------
    @classmethod
    def open(cls, group: Rendezvous, *, timeout_s: float) -> HostLink:
        """Connect every pair of ranks. Collective; leaves nothing behind when it fails.

        Raises:
            Unavailable: Some pair cannot connect (other host, other network namespace, other user); on every rank.
            CommTimeout: A rank did not come.
        """
        deadline = time.monotonic() + timeout_s
        link: HostLink | None = None
        try:
            try:
                link = cls(group)
                reason = link._listen()
            except OSError as e:  # no descriptor left: the others must hear of it in the exchanges they wait in
                reason = f"no sockets: {e}"
            answers = group.exchange(link._name if link is not None and not reason else b"", timeout_s=timeout_s)
            # Every rank listens by now and answers from its own thread, so each dial succeeds or fails at once.
            for peer in range(group.rank if link is not None and not reason else 0):
                assert link is not None
                reason = link._dial(peer, answers[peer], deadline) if answers[peer] else f"rank {peer} cannot listen"
                if reason:
                    break
            votes = group.exchange(reason.encode()[:400], timeout_s=max(deadline - time.monotonic(), 1.0))
            bad = [f"rank {r}: {v.decode(errors='replace')}" for r, v in enumerate(votes) if v]
            if bad or link is None:
                raise Unavailable(
                    "the ranks of this group are not connected by Unix sockets: " + "; ".join(bad),
                    "they must share a host, a network namespace and a user",
                )
            link._soon(link._stop_listening)
        except BaseException:
            if link is not None:
                link.close(goodbye=False)
            raise
        return link

    def _listen(self) -> str:
        try:
            self._listener.bind(self._name)
            self._listener.listen(max(self.size, 16))
        except OSError as e:
            return f"bind of an abstract Unix socket: {e}"
        self._selector.register(self._listener.fileno(), selectors.EVENT_READ, self._accept)
        self._watcher.start()
        return ""

    def _dial(self, peer: int, name: bytes, deadline: float) -> str:
        """Connect to ``peer``; return "" or the reason why not."""
        reason = "no attempt was made in time"
        while (left := deadline - time.monotonic()) > 0:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                sock.settimeout(left)
                sock.connect(name)
                pid, uid = _credentials(sock)
                if uid != os.geteuid():
                    return f"rank {peer} runs as user {uid}, this rank as {os.geteuid()}"
                sock.sendall(self._hello(self.rank, peer, name))
                if hmac.compare_digest(sock.recv(_HELLO.size), self._hello(peer, self.rank, name)):
                    kept, sock = sock, None  # type: ignore[assignment]
                    self._adopt(peer, kept, pid)
                    return ""
                reason = f"rank {peer} closed the connection during the handshake"
            except (BlockingIOError, ConnectionResetError, BrokenPipeError) as e:
                reason = f"connect to rank {peer}: {e}"  # a full backlog, or dropped in a crowd of strangers: try again
            except OSError as e:
                return f"connect to rank {peer}: {e}"
            finally:
                if sock is not None:
                    sock.close()
            time.sleep(min(0.005, left))
        return reason

    def _hello(self, sender: int, receiver: int, name: bytes) -> bytes:
        """What ``sender`` says to ``receiver`` on the listener called ``name``: only who knows the token can."""
        text = struct.pack("<ii", sender, receiver) + name
        digest = hmac.new(self._token, text, hashlib.sha256).digest()
        return _HELLO.pack(_HELLO_MAGIC, sender, receiver, digest)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # it gave up already, or descriptors ran out: the peer tries again
            time.sleep(0.005)
            return
        sock.setblocking(False)
        if _credentials(sock)[1] != os.geteuid():
            sock.close()
            return
        self._strangers.append(sock)
        self._selector.register(sock.fileno(), selectors.EVENT_READ, lambda: self._greet(sock))
        if len(self._strangers) > _PENDING:
            self._forget(self._strangers.popleft())

    def _greet(self, sock: socket.socket) -> None:
        """Read a stranger's hello: adopt it as a peer, or drop it without a word."""
        self._strangers.remove(sock)
        try:
            raw = sock.recv(_HELLO.size + 1)
        except OSError:
            raw = b""
        peer = _HELLO.unpack(raw)[1] if len(raw) == _HELLO.size else -1
        known = self.rank < peer < self.size and peer not in self._peers
        if not known or not hmac.compare_digest(raw, self._hello(peer, self.rank, self._name)):
            self._forget(sock)
            return
        self._selector.unregister(sock.fileno())
        self._register(peer, sock, _credentials(sock)[0])
        try:
            sock.send(self._hello(self.rank, peer, self._name))
        except OSError:
            self._lose(peer)

    def _forget(self, sock: socket.socket) -> None:
        self._selector.unregister(sock.fileno())
        sock.close()

    def _adopt(self, peer: int, sock: socket.socket, pid: int) -> None:
        sock.setblocking(False)
        with self._news:
            self._peers[peer] = sock  # at once, so that close() finds it even if the watcher never runs
        self._soon(lambda: self._register(peer, sock, pid))

    def _register(self, peer: int, sock: socket.socket, pid: int) -> None:
        with self._news:
            self._peers[peer] = sock
        self._selector.register(sock.fileno(), selectors.EVENT_READ, lambda: self._hear(peer))
        try:
            # A child forked by the peer may hold its sockets open after it died; a pidfd is not fooled.
            self._pidfds[peer] = os.pidfd_open(pid) if pid else -1
            if pid:
                self._selector.register(self._pidfds[peer], selectors.EVENT_READ, lambda: self._lose(peer))
        except (OSError, AttributeError):
            self._pidfds.setdefault(peer, -1)

    def _stop_listening(self) -> None:
        self._forget(self._listener)
        while self._strangers:
            self._forget(self._strangers.popleft())

    # -- the watch thread --------------------------------------------------------------------------------------------
    def _soon(self, action: Callable[[], None]) -> None:
        """Have the watch thread, which alone touches the selector, run ``action``."""
        self._todo.append(action)
        with contextlib.suppress(OSError):  # full: it has been woken often enough; closed: there is nothing to wake
            self._bell.send(b"!")

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._ear.recv(4096)
        while self._todo:
            self._todo.popleft()()

    def _watch(self) -> None:
        try:
            while not self._ending:
                for key, _ in self._selector.select(1.0):
                    # An earlier event of this round may have closed the link, or dropped this connection.
                    if not self._ending and self._selector.get_map().get(key.fd) is key:
                        key.data()
        except Exception as e:  # a link that does not watch any more must not look alive
            log.exception("commbackend: the host link of rank %d failed", self.rank)
            fault = CommAborted(f"the host link of rank {self.rank} failed: {e!r}", rank=self.rank)
            self.interrupt(fault)
            self._report(self.rank, fault)

    def _hear(self, peer: int) -> None:
        """Read every frame that ``peer`` has sent."""
        while peer not in self._gone:
            try:
                raw, fds, truncated = _receive(self._peers[peer])
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue  # it closed with something of ours unread; its own last frames come next
            except OSError:
                raw, fds, truncated = b"", [], False
            if not raw:
                self._leave(peer, "died")
            elif not self._take(peer, raw, fds, truncated):
                _close_all(fds)
                self._leave(peer, "broke the protocol")

    def _take(self, peer: int, raw: bytes, fds: list[int], truncated: bool) -> bool:
        if len(raw) < _FRAME.size or len(raw) > _FRAME.size + PARCEL_NBYTES:
            return False
        magic, kind, count, number = _FRAME.unpack_from(raw)
        if magic != _FRAME_MAGIC or (len(fds) != count and not truncated) or (fds and kind != _PARCEL):
            return False
        if kind == _PARCEL:
            with self._news:
                if (peer, number) in self._parcels:
                    return False
                self._parcels[peer, number] = raw[_FRAME.size :], fds, truncated
                self._news.notify_all()
        elif kind == _FAULT:
            fault = unpack_fault(raw[_FRAME.size :])
            if fault is None:
                return False
            self._report(peer, fault)
        elif kind == _BYE:
            self._leave(peer, "left")
        else:
            return False
        return True

    def _lose(self, peer: int) -> None:
        """The process of ``peer`` is gone; its last words may still be in the socket."""
        self._hear(peer)
        self._leave(peer, "died")

    def _leave(self, peer: int, how: str) -> None:
        if peer in self._gone:
            return
        with self._news:
            self._gone[peer] = how
            self._news.notify_all()
        self._selector.unregister(self._peers[peer].fileno())
        if self._pidfds.get(peer, -1) >= 0:
            self._selector.unregister(self._pidfds[peer])
        if self._closed:
            return  # this rank has said goodbye: whoever ends now ends in order
        if how == "died":
            self._report(peer, None)
        elif how != "left":
            self._report(peer, CommAborted(f"rank {peer} {how} of the host link", rank=peer))

    def _report(self, peer: int, fault: CommBackendError | None) -> None:
        with self._news:
            callback = self._callback
            if callback is None:
                self._missed.append((peer, fault))
        if callback is not None:
            callback(peer, fault)

    # -- for the transport -------------------------------------------------------------------------------------------
    def on_fault(self, callback: FaultCallback) -> None:
        """Have the watch thread call ``callback(rank, fault)`` when a peer tells a fault, or dies (then with None).

        What happened before this call is reported at once, from this thread. Local. In a forked child ``callback`` is
        called with this rank and the error that every use of the communicator raises there.
        """
        with self._news:
            self._callback = callback
            missed, self._missed = self._missed, []
        for peer, fault in missed:
            callback(peer, fault)

    def tell(self, fault_bytes: bytes) -> None:
        """Send a fault packed by ``errors.pack_fault`` to all peers. Local, does not block, any thread."""
        if len(fault_bytes) != FAULT_NBYTES:
            raise ValueError(f"a packed fault has {FAULT_NBYTES} bytes, not {len(fault_bytes)}")
        self._broadcast(_FRAME.pack(_FRAME_MAGIC, _FAULT, 0, 0) + fault_bytes)

    def interrupt(self, fault: CommBackendError) -> None:
        """Make every exchange that is waiting, and every later one, raise ``fault``. Local, any thread."""
        with self._news:
            self._broken = self._broken or fault
            self._news.notify_all()

    def exchange_fds(self, fds: Sequence[int], payload: bytes, deadline: float) -> list[tuple[bytes, list[int]]]:
        """All-gather bytes and descriptors. Collective.

        Returns:
            One (payload, descriptors) a rank. The descriptors of others are new, close-on-exec, and the caller's to
            close; this rank's own entry holds ``fds`` themselves.
        Raises:
            CommTimeout: Naming the ranks that have not come by ``deadline``. PeerDied: One of them died.
            Unavailable: Descriptors were lost because this process may not open more (``ulimit -n``).
        """
        self._owned()
        if len(payload) > PARCEL_NBYTES or len(fds) > PARCEL_FDS:
            text = f"at most {PARCEL_NBYTES} bytes and {PARCEL_FDS} descriptors"
            raise ValueError(f"{text}, not {len(payload)} and {len(fds)}")
        with self._exchanging:
            number, self._exchanges = self._exchanges, self._exchanges + 1
            frame = _FRAME.pack(_FRAME_MAGIC, _PARCEL, len(fds), number) + payload
            peers = [p for p in range(self.size) if p != self.rank]
            for peer in peers:
                self._send(peer, frame, fds, deadline)
            with self._news:
                while late := [p for p in peers if (p, number) not in self._parcels]:
                    self._check(late)
                    if (left := deadline - time.monotonic()) <= 0:
                        raise _late(self.rank, late)
                    self._news.wait(min(left, 0.5))
                found = {p: self._parcels.pop((p, number)) for p in peers}
        if any(truncated for _, _, truncated in found.values()):
            for _, received, _ in found.values():
                _close_all(received)
            raise Unavailable(f"rank {self.rank} cannot open {len(peers) * len(fds)} more files", "raise ulimit -n")
        found[self.rank] = payload, list(fds), False
        return [found[p][:2] for p in range(self.size)]

    def exchange(self, payload: bytes, deadline: float) -> list[bytes]:
        """All-gather of bytes. Collective; raises as ``exchange_fds``."""
        return [raw for raw, _ in self.exchange_fds((), payload, deadline)]

    def _send(self, peer: int, frame: bytes, fds: Sequence[int], deadline: float) -> None:
        poll = select.poll()
        sock = self._peers[peer]
        while True:
            with self._news:
                self._check([peer])
            try:
                socket.send_fds(sock, [frame], fds) if fds else sock.send(frame)
                return
            except BlockingIOError:
                if (left := deadline - time.monotonic()) <= 0:
                    raise _late(self.rank, [peer]) from None
                poll.register(sock, select.POLLOUT)
                poll.poll(min(left, 0.1) * 1000)
            except (BrokenPipeError, ConnectionResetError) as e:
                with self._news:  # the watch thread is about to learn whether it died or left
                    self._news.wait_for(lambda: peer in self._gone, 1.0)
                    self._check([peer])
                raise PeerDied(f"rank {peer} died: rank {self.rank} cannot reach it any more", rank=peer) from e

    def _check(self, needed: Sequence[int]) -> None:
        """Raise if the link is broken or a needed peer is gone. The caller holds ``_news``."""
        if self._broken is not None:
            raise self._broken
        if self._closed:
            raise CommAborted(f"the host link of rank {self.rank} is closed", rank=self.rank)
        for peer in needed:
            how = self._gone.get(peer)
            if how == "died":
                raise PeerDied(f"rank {peer} died; rank {self.rank} was exchanging bytes with it", rank=peer)
            if how:
                raise CommAborted(f"rank {peer} has closed the communicator that rank {self.rank} uses", rank=peer)

    def _broadcast(self, frame: bytes) -> None:
        for sock in list(self._peers.values()):
            # It left or died, or it is stopped with a full buffer: then its own deadline or watcher tells it.
            with contextlib.suppress(OSError):
                sock.send(frame)

    def _owned(self) -> None:
        if os.getpid() != self._pid:
            raise _forked(self._pid)

    def close(self, *, goodbye: bool = True) -> None:
        """Leave the mesh: local, idempotent. Without ``goodbye`` the peers take this rank for dead."""
        with self._news:
            if self._closed:
                return
            self._closed = True
            self._news.notify_all()
        if os.getpid() != self._pid:
            return  # the fork hook has closed the child's copies
        if goodbye:
            self._broadcast(_FRAME.pack(_FRAME_MAGIC, _BYE, 0, 0))
        self._ending = True
        if self._watcher.is_alive() and self._watcher is not threading.current_thread():
            self._soon(lambda: None)
            self._watcher.join(5.0)
        self._drop()

    def _drop(self) -> None:
        """Close every descriptor of this process."""
        self._selector.close()
        for sock in (self._bell, self._ear, self._listener, *self._strangers, *self._peers.values()):
            sock.close()
        _close_all([fd for fd in self._pidfds.values() if fd >= 0])
        self._pidfds.clear()
        for _, fds, _ in self._parcels.values():
            _close_all(fds)
        self._parcels.clear()

    def _in_child(self) -> None:
        """A fork copied this object: give up the copies of the sockets, so that a death of the parent is still seen."""
        if not self._closed:
            self._news, self._closed = threading.Condition(), True  # its lock may have been held by another thread
            self._drop()
            if self._callback is not None:
                self._callback(self.rank, _forked(self._pid))


_LINKS: weakref.WeakSet[HostLink] = weakref.WeakSet()


def _after_fork() -> None:
    for link in list(_LINKS):
        link._in_child()


os.register_at_fork(after_in_child=_after_fork)


def _forked(pid: int) -> CommAborted:
    return CommAborted(
        f"this communicator belongs to process {pid}; process {os.getpid()} is a fork of it and cannot use it: "
        "start workers before commbackend.init, or by spawn"
    )


def _late(rank: int, late: Sequence[int]) -> CommTimeout:
    names = ", ".join(map(str, late))
    return CommTimeout(f"rank {rank} waited in an exchange for rank(s) {names}", rank=late[0], waiting_for=late)


def _credentials(sock: socket.socket) -> tuple[int, int]:
    """Process id (0 if it is in a namespace that is not visible here) and user id of the other end."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


def _receive(sock: socket.socket) -> tuple[bytes, list[int], bool]:
    """One frame, its descriptors, and whether some of these are lost. (socket.recv_fds drops its flags.)"""
    fds = array.array("i")
    room = socket.CMSG_SPACE(PARCEL_FDS * fds.itemsize)
    raw, parts, flags, _ = sock.recvmsg(_FRAME.size + PARCEL_NBYTES + 1, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in parts:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return raw, list(fds), bool(flags & socket.MSG_CTRUNC)


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
