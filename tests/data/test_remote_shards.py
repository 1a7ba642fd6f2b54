"""Token shards at an address: the same order and bits as on disk, whatever the connection does."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import io
import json
import multiprocessing
import os
import pickle
import shutil
import threading
import warnings
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from tests.data.range_server import serving
from tests.waiting import LIMIT, wait_until
from torch.utils.data import DataLoader, Dataset

from arclight.data import ResumableLoader, TokenShards
from arclight.data.computed_order import EpochOrder
from arclight.data.fetching import identity
from arclight.data.packing import Packed, Windows
from arclight.data.remote.block_folder import BlockFolder
from arclight.data.remote.block_reader import BlockReader, Prefetch
from arclight.data.remote.ranges import ReadCancelledError, RemoteReadError, is_transient
from arclight.data.remote.remote_shards import RemoteTokenShards, ShardBlocks
from arclight.data.token_samples import TokenSamples
from arclight.data.token_shards import BLOCK_BYTES, HEADER_BYTES, TokenShardError, write_index, write_shard

pytest.importorskip("aiohttp")
VOCAB = 1000


def write(folder: Path, seed: int = 0) -> TokenShards:
    """Three shards of 7 blocks in all, of documents of all lengths."""
    folder.mkdir(parents=True)
    rng, names = np.random.default_rng(seed), []
    for number, size in enumerate((90_000, 30_000, 70_000)):
        cuts = np.sort(rng.integers(0, size, 300))
        documents = np.split(rng.integers(0, VOCAB, size), cuts)
        names.append(f"{number:05d}.tokens")
        write_shard(folder / names[-1], documents, tokenizer="abc", vocab_size=VOCAB, text_bytes=size)
    write_index(folder, names)
    return TokenShards(folder)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> TokenShards:
    return write(tmp_path_factory.mktemp("remote") / "corpus")


def reader(folder: Path, bound_bytes: int = 2**22, **options: Any) -> BlockReader:
    return BlockReader(folder, bound_bytes, **{"patience_s": 20.0, "connections": 3} | options)


def samples(shards: TokenShards, length: int = 512, packed: bool = False) -> TokenSamples:
    layout = Packed.build(shards, length) if packed else Windows(shards, length)
    return TokenSamples([layout], np.ones(VOCAB, np.int64))


def batches(data: TokenSamples, *, start: int = 0, rank: int = 0, world_size: int = 1, workers: int = 0) -> list[Any]:
    loader = DataLoader(data, 4, sampler=EpochOrder(len(data)), collate_fn=identity, num_workers=workers)
    resumable = ResumableLoader(loader, seed=3, rank=rank, world_size=world_size)
    return list(resumable.batches(1, start))


def same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a) for a, b in zip(one, other)
    )


def stored(folder: Path) -> int:
    """Bytes of all that lies in the folder, each file once; meanwhile no thread makes room or takes it."""
    found = {}
    with (folder / ".usage").open("ab") as usage:
        fcntl.flock(usage, fcntl.LOCK_EX)
        for path in folder.rglob("*"):
            if path.name != ".usage" and ".locks" not in path.parts:
                with contextlib.suppress(FileNotFoundError):  # renamed meanwhile
                    facts = path.stat()
                    found[facts.st_ino] = facts.st_size if path.is_file() else 0
    return sum(found.values())


def read_ahead_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("arclight-read-ahead")]


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("packed", [False, True])
def test_order_and_bits_are_those_on_disk(local: TokenShards, tmp_path: Path, world_size: int, packed: bool) -> None:
    with serving(local.folder) as server:
        through = reader(tmp_path / "blocks")
        remote = RemoteTokenShards(server.address, through)
        assert (remote.tokens, remote.digest, remote.documents) == (local.tokens, local.digest, local.documents)
        assert (remote.ends() == local.ends()).all()
        for rank in range(world_size):
            there, here = (
                batches(samples(s, packed=packed), rank=rank, world_size=world_size) for s in (remote, local)
            )
            assert here
            assert same(there, here)
        through.close()


def test_it_resumes_at_any_batch(local: TokenShards, tmp_path: Path) -> None:
    whole = batches(samples(local))
    with serving(local.folder) as server:
        through = reader(tmp_path)
        data = samples(RemoteTokenShards(server.address, through))
        loader = DataLoader(data, 4, sampler=EpochOrder(len(data)), collate_fn=identity)
        first = ResumableLoader(loader, seed=3).batches(1)
        begun = [next(first) for _ in range(5)]  # and no more of it
        through.close()
        assert same(begun + batches(data, start=5), whole)
        through.close()


def test_workers_read_through_the_same_folder(local: TokenShards, tmp_path: Path) -> None:
    with serving(local.folder) as server:
        through = reader(tmp_path)
        data = samples(RemoteTokenShards(server.address, through))
        assert same(batches(data, workers=2), batches(samples(local)))
        through.close()
        blocks = sum(facts.blocks for facts in local.facts)
        gets = sum(n for (method, path), n in server.requests.items() if method == "GET" and path.endswith(".tokens"))
        assert gets == blocks  # whoever needs a block that another process fetches waits for it


def test_a_fork_beside_a_thread_that_reads_can_read(local: TokenShards, tmp_path: Path) -> None:
    """As a worker of a validation that begins while blocks of an epoch are fetched ahead."""
    remote = RemoteTokenShards(f"file://{local.folder}", reader(tmp_path))
    with remote._origin._lock:  # which a thread has for a moment
        forked = multiprocessing.get_context("fork").Process(target=remote.read, args=(0, 100))
        forked.start()
        forked.join(LIMIT)
        ended = forked.exitcode
        forked.kill()
    forked.join()
    assert ended == 0


@pytest.mark.parametrize("protocol", ["file", "memory"])
def test_any_file_system_does(local: TokenShards, tmp_path: Path, protocol: str) -> None:
    address = f"{protocol}://{local.folder if protocol == 'file' else '/tokens'}"
    if protocol == "memory":
        for path in filter(Path.is_file, local.folder.iterdir()):
            fsspec.filesystem("memory").pipe_file(f"/tokens/{path.name}", path.read_bytes())
    remote = RemoteTokenShards(address, reader(tmp_path))
    assert (remote.read(0, remote.tokens) == local.read(0, local.tokens)).all()
    again = pickle.loads(pickle.dumps(remote))
    assert (again.document(400) == local.document(400)).all()
    assert again.boundaries(5, 80_000).tolist() == local.boundaries(5, 80_000).tolist()


# -- the connection ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [503, 429, 500, "cut", "drop", "short"])
def test_a_lost_connection_changes_nothing(local: TokenShards, tmp_path: Path, fault: Any) -> None:
    with serving(local.folder, lambda method, path, number: fault if number in (1, 3) else None) as server:
        through = reader(tmp_path)
        remote = RemoteTokenShards(server.address, through)
        expected = remote.prefetch([(0, remote.tokens)], boundaries=True)
        assert (remote.read(0, remote.tokens) == local.read(0, local.tokens)).all()
        remote.release(expected)
        through.close()


@pytest.mark.parametrize("status", [401, 403, 404, 410])
def test_permanent_errors_are_not_retried(local: TokenShards, tmp_path: Path, status: int) -> None:
    def fault(method: str, path: str, number: int) -> Any:
        return status if path.endswith("1.tokens") and method == "GET" else None

    with serving(local.folder, fault) as server:
        remote = RemoteTokenShards(server.address, reader(tmp_path, patience_s=60.0))
        remote.read(0, 10)
        with pytest.raises((RemoteReadError, TokenShardError), match=r"00001\.tokens"):
            remote.read(95_000, 95_010)
        assert server.requests["GET", "/00001.tokens"] == 1


def test_a_server_that_stays_away_is_named(local: TokenShards, tmp_path: Path) -> None:
    with serving(local.folder) as server:
        remote = RemoteTokenShards(server.address, reader(tmp_path, patience_s=0.3))
        server.fault = lambda *_: 503
        with pytest.raises(RemoteReadError, match=r"00000\.tokens.*503.*tried again for 0.3 s") as raised:
            remote.read(0, 10)
        assert raised.value.__cause__ is not None
        server.fault = None
        assert remote.read(0, 10).tolist() == local.read(0, 10).tolist()


def test_a_server_without_ranges_is_refused(local: TokenShards, tmp_path: Path) -> None:
    with serving(local.folder, lambda method, path, number: "whole" if path.endswith(".tokens") else None) as server:
        remote = RemoteTokenShards(server.address, reader(tmp_path))
        with pytest.raises(RemoteReadError, match="ignores ranges"):
            remote.read(0, 10)


def test_errors_are_distinguished() -> None:
    wrapped = FileNotFoundError("x")
    wrapped.__cause__ = ConnectionResetError()
    assert is_transient(wrapped)
    assert is_transient(TimeoutError())
    assert is_transient(OSError(16, "slow down"))
    for permanent in (FileNotFoundError("x"), PermissionError("x"), ValueError("x"), OSError(28, "disk full")):
        assert not is_transient(permanent)


# -- what is at the address --------------------------------------------------------------------------------------------


def test_a_changed_shard_is_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path / "corpus")
    path = tmp_path / "corpus" / "00001.tokens"
    with serving(tmp_path / "corpus") as server:
        remote = RemoteTokenShards(server.address, reader(tmp_path / "blocks"))
        remote.read(0, 10)
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(TokenShardError, match=r"00001\.tokens changed at its address: its content"):
            remote.ends()
        path.write_bytes(content[:-8])
        again = RemoteTokenShards(server.address, reader(tmp_path / "blocks"))
        with pytest.raises(TokenShardError, match=r"00001\.tokens changed at its address: it has [\d,]+ bytes"):
            again.ends()
        path.unlink()
        with pytest.raises(TokenShardError, match=r"00001\.tokens is missing"):
            RemoteTokenShards(server.address, reader(tmp_path / "blocks")).ends()


@pytest.mark.parametrize("name", ["00000.tokens", "00000.tokens.sums"])
@pytest.mark.parametrize("ahead", [False, True])
def test_files_deleted_within_an_epoch_are_named(tmp_path: Path, name: str, ahead: bool) -> None:
    write(tmp_path / "corpus")
    with serving(tmp_path / "corpus") as server:
        through = reader(tmp_path / "blocks")
        remote = RemoteTokenShards(server.address, through)
        if not name.endswith(".sums"):
            remote.read(60_000, 60_010)  # of a later block
        (tmp_path / "corpus" / name).unlink()
        if ahead:
            remote.prefetch([(0, 10)], boundaries=False)
            wait_until(lambda: through._state()._failed, "the thread has failed")
        with pytest.raises(TokenShardError, match=rf"{server.address}/{name} is missing, .* upload it"):
            remote.read(0, 10)
        through.close()


def test_a_change_that_reading_ahead_meets_reaches_the_reader(tmp_path: Path) -> None:
    write(tmp_path / "corpus")
    path = tmp_path / "corpus" / "00000.tokens"
    content = bytearray(path.read_bytes())
    content[HEADER_BYTES] ^= 1
    with serving(tmp_path / "corpus") as server:
        through = reader(tmp_path / "blocks")
        remote = RemoteTokenShards(server.address, through)
        path.write_bytes(content)
        remote.prefetch([(0, 10)], boundaries=False)
        wait_until(lambda: server.requests["GET", "/00000.tokens"] >= 3, "three attempts")
        with pytest.raises(TokenShardError, match=r"00000\.tokens changed"):
            remote.read(0, 10)
        path.write_bytes(bytes([*content[:HEADER_BYTES], content[HEADER_BYTES] ^ 1, *content[HEADER_BYTES + 1 :]]))
        remote.read(0, 10)  # mended
        through.close()


def test_any_error_of_a_thread_reaches_the_reader(local: TokenShards, tmp_path: Path, monkeypatch: Any) -> None:
    def broken(*_: Any) -> bytes:
        raise SystemExit("out of order")

    through = reader(tmp_path)
    remote = RemoteTokenShards(f"file://{local.folder}", through)
    monkeypatch.setattr("arclight.data.remote.remote_shards.ShardBlocks.fetch", broken)
    remote.prefetch([(0, 10)], boundaries=False)
    with pytest.raises(SystemExit, match="out of order"):
        remote.read(0, 10)
    monkeypatch.undo()
    assert remote.read(0, 10).size == 10
    assert len(read_ahead_threads()) >= 1  # it did not end the thread
    through.close()


@pytest.mark.parametrize(
    "change",
    [
        {"file": "../0.tokens"}, {"file": "/etc/passwd"}, {"file": "a/b"}, {"file": ".."}, {"file": ""}, {"file": 3},
        {"tokens": 2**60}, {"documents": -1}, {"tokens": True}, {"dtype": "object"}, {"sha256": "../.."}, {"sums": "zz"},
        {"more": 1},
    ],
)  # fmt: skip
def test_a_hostile_index_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    write(tmp_path / "corpus")
    path = tmp_path / "corpus" / "corpus.json"
    index = json.loads(path.read_text())
    index["shards"][0] |= change
    path.write_text(json.dumps(index))
    for opened in (
        lambda: RemoteTokenShards(f"file://{tmp_path / 'corpus'}", reader(tmp_path / "b")),
        lambda: TokenShards(path.parent),
    ):
        with pytest.raises(TokenShardError, match=r"corpus\.json cannot be read"):
            opened()


def test_counts_that_no_shard_has_take_no_memory(tmp_path: Path) -> None:
    write(tmp_path / "corpus")
    path = tmp_path / "corpus" / "corpus.json"
    index = json.loads(path.read_text())
    index["shards"][0]["documents"] = 2**46
    path.write_text(json.dumps(index))
    through = reader(tmp_path / "b")
    remote = RemoteTokenShards(f"file://{tmp_path / 'corpus'}", through)
    remote.release(remote.prefetch([(0, 10)], boundaries=True))
    with pytest.raises(TokenShardError, match=r"00000\.tokens changed at its address: it has"):
        remote.boundaries(0, 10)
    through.close()


def test_a_corpus_without_block_digests_is_refused_with_the_fix(tmp_path: Path) -> None:
    from arclight.data.token_shards import write_sums

    before = write(tmp_path / "corpus")
    path = tmp_path / "corpus" / "corpus.json"
    original, index = path.read_text(), json.loads(path.read_text())
    for entry in index["shards"]:
        del entry["sums"]
    path.write_text(json.dumps(index))
    for sums in path.parent.glob("*.sums"):
        sums.rename(tmp_path / sums.name)
    with pytest.raises(TokenShardError, match="arclight data inspect CORPUS --sums"):
        RemoteTokenShards(f"file://{path.parent}", reader(tmp_path / "b"))
    assert write_sums(path.parent) == 3
    assert all((tmp_path / sums.name).read_bytes() == sums.read_bytes() for sums in path.parent.glob("*.sums"))
    assert {tuple(sorted(e.items())) for e in json.loads(path.read_text())["shards"]} == {
        tuple(sorted(e.items())) for e in json.loads(original)["shards"]
    }
    assert RemoteTokenShards(f"file://{path.parent}", reader(tmp_path / "b")).digest == before.digest


# -- the local folder --------------------------------------------------------------------------------------------------


def test_the_folder_never_grows_beyond_its_bound(local: TokenShards, tmp_path: Path) -> None:
    bound = 3 * BLOCK_BYTES + 5000
    with serving(local.folder) as server:
        through = reader(tmp_path, bound, connections=2)
        data = samples(RemoteTokenShards(server.address, through))
        loader = DataLoader(data, 4, sampler=EpochOrder(len(data)), collate_fn=identity)
        found = []
        for batch in ResumableLoader(loader, seed=3).batches(1):
            found.append(batch)
            assert stored(tmp_path) <= bound
        through.close()
        assert same(found, batches(samples(local)))
        assert stored(tmp_path) <= bound


def test_the_longest_unused_goes_first_and_nothing_that_is_held(tmp_path: Path) -> None:
    one, other = BlockFolder(tmp_path, 1000), BlockFolder(tmp_path, 1000)
    for number in range(3):
        one.put(f"s/{number}", one.reserve(300), bytes(300))
        os.utime(tmp_path / "s" / str(number), ns=(number, number))
    assert other.hold("s/0")
    os.utime(tmp_path / "s" / "0", ns=(0, 0))
    assert one.get("s/1") is not None  # used now
    one.put("s/3", one.reserve(300), bytes(300))
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == ["0", "1", "3"]
    for key in ("s/1", "s/3"):
        assert one.hold(key)
    assert one.reserve(300) is None  # all of it is held
    other.close()
    assert one.reserve(300) is not None
    one.close()


@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.parametrize("failing", ["write", "replace"])
def test_a_full_disk_leaves_nothing_reserved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str, hold: bool
) -> None:
    folder = BlockFolder(tmp_path, 1000)
    folder.put("s/0", folder.reserve(300), bytes(300))
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    reserved = folder.reserve(400)

    def replace(*_: Any) -> None:
        raise full

    class Full(io.FileIO):
        """A disk with room for 100 bytes more."""

        def write(self, content: Any) -> int:
            super().write(content[:100])
            raise full

    if failing == "write":
        opened = Path.open
        monkeypatch.setattr(
            Path,
            "open",
            lambda path, mode: Full(path, mode.replace("b", "")) if path == reserved else opened(path, mode),
        )
    else:
        monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(OSError, match="No space left"):
        folder.put("s/1", reserved, bytes(400), hold=hold)
    monkeypatch.undo()
    assert int((tmp_path / ".usage").read_text()) == stored(tmp_path) == 300
    assert [path.name for path in (tmp_path / ".holders").rglob("*") if path.is_file()] == ["lock"]
    folder.put("s/1", folder.reserve(700), bytes(700))  # all the room there is
    assert folder.get("s/0") is not None
    folder.close()


def test_full_disk_errors_of_a_prefetch_reach_the_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def replace(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    source, through = Gated(), reader(tmp_path, 4 * 4000)
    source.gate.release(100)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        expected = through.prefetch([(source, (0, 0))])
        wait_until(lambda: through._running._failed, "the thread has failed")
        with pytest.raises(OSError, match="No space left"):
            through.read(source, (0, 0))
    assert through.recount() == 0
    assert through.read(source, (0, 0)) == bytes(1000)
    through.release(expected)
    through.close()


def _hold_and_die(folder: Path) -> None:
    mine = BlockFolder(folder, 1000)
    mine.put("s/0", mine.reserve(600), bytes(600), hold=True)
    mine.reserve(300)
    os._exit(0)


def test_reservations_of_a_killed_process_are_released(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=_hold_and_die, args=(tmp_path,))
    process.start()
    process.join()
    mine = BlockFolder(tmp_path, 1000)
    assert mine.get("s/0") == bytes(600)
    assert mine.reserve(900) is not None
    assert stored(tmp_path) == 900
    mine.close()


def _read_all(address: str, folder: Path, results: Any) -> None:
    remote = RemoteTokenShards(address, reader(folder))
    results.put(remote.read(0, remote.tokens).tobytes())


def test_two_processes_share_the_folder(local: TokenShards, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    with serving(local.folder) as server:
        processes = [context.Process(target=_read_all, args=(server.address, tmp_path, results)) for _ in range(2)]
        for process in processes:
            process.start()
        found = [results.get(timeout=120) for _ in processes]
        for process in processes:
            process.join()
        assert found == [local.read(0, local.tokens).tobytes()] * 2
        blocks = {-(-facts.token_bytes // BLOCK_BYTES) for facts in local.facts}
        gets = [n for (method, path), n in server.requests.items() if method == "GET" and path.endswith(".tokens")]
        assert set(gets) == blocks  # each block once


def test_a_block_that_was_damaged_here_is_fetched_again(local: TokenShards, tmp_path: Path) -> None:
    address = f"file://{local.folder}"
    RemoteTokenShards(address, reader(tmp_path)).read(0, 10)
    (block,) = (path for path in tmp_path.rglob("00000000"))
    for content in (b"", bytes(BLOCK_BYTES)):
        block.write_bytes(content)
        assert (RemoteTokenShards(address, reader(tmp_path)).read(0, 10) == local.read(0, 10)).all()
        assert len(block.read_bytes()) == BLOCK_BYTES


# -- ahead of need -----------------------------------------------------------------------------------------------------


def test_it_is_there_before_it_is_needed(local: TokenShards, tmp_path: Path) -> None:
    with serving(local.folder) as server:
        through = reader(tmp_path)
        remote = RemoteTokenShards(server.address, through)
        expected = remote.prefetch([(0, 100), (100_000, 100_100)], boundaries=True)
        assert expected.blocks
        wait_until(lambda: all((tmp_path / wanted.key).exists() for wanted in expected.blocks), "all that is expected")
        wait_until(lambda: not through._running._jobs, "the end of all jobs")
        asked = sum(server.requests.values())
        remote.read(0, 100), remote.boundaries(100_000, 100_100)
        assert sum(server.requests.values()) == asked
        links = list((tmp_path / ".holders").rglob("*-0*"))
        remote.release(expected)
        assert len([link for link in links if link.is_file()]) == 0
        through.close()


class Gated:
    """Blocks of 1000 bytes, whose fetches wait until ``gate`` lets them through; ``fetched`` has the threads that fetched them."""

    def __init__(self) -> None:
        self.gate, self.lock = threading.Semaphore(0), threading.Lock()
        self.in_flight, self.fetched = 0, list[tuple[int, bool]]()

    def key(self, block: tuple[int, int]) -> str:
        return f"gated/{block[1]}"

    def size(self, block: tuple[int, int]) -> int:
        return 1000

    def digest(self, block: tuple[int, int], cancel: threading.Event) -> bytes:
        return b""

    def is_intact(self, content: bytes, digest: bytes) -> bool:
        return True

    def fetch(self, block: tuple[int, int], digest: bytes, cancel: threading.Event) -> bytes:
        with self.lock:
            self.in_flight += 1
        assert self.gate.acquire(timeout=120)
        with self.lock:
            self.in_flight -= 1
            self.fetched.append((block[1], threading.current_thread().name.startswith("arclight-read-ahead")))
        return bytes([block[1]]) * 1000


def test_connections_stay_busy_where_more_is_expected_than_there_is_room_for(tmp_path: Path) -> None:
    source, through = Gated(), reader(tmp_path, 4 * 4000)  # room for four blocks ahead

    def expect(n: int) -> Prefetch:
        return through.prefetch([(source, (0, 2 * n)), (source, (0, 2 * n + 1))])

    expected = [expect(0)]
    wait_until(lambda: source.in_flight == 2, "a fetch for each block")
    expected.append(expect(1))
    wait_until(lambda: source.in_flight == 3, "as many fetches as connections")
    expected += [expect(n) for n in range(2, 10)]
    source.gate.release(4)
    wait_until(lambda: not through._running._jobs, "the end of the first four")
    assert sorted(source.fetched) == [(n, True) for n in range(4)]  # and nothing that there is no room for
    for n, one in enumerate(expected):
        for block in (2 * n, 2 * n + 1):
            assert through.read(source, (0, block)) == bytes([block]) * 1000  # a fetch would wait for the gate
        through.release(one)
        if n < 8:
            wait_until(lambda: source.in_flight == 2, "fetches of what follows")
            source.gate.release(2)
            wait_until(lambda: not through._running._jobs, "their end")
    assert sorted(source.fetched) == [(n, True) for n in range(20)]
    assert through._running._expected_bytes == 0
    through.close()


def test_blocks_needed_much_later_reserve_no_space(tmp_path: Path) -> None:
    source, through = Gated(), reader(tmp_path, 4 * 2000)  # room for two
    source.gate.release(100)
    expected = [through.prefetch([(source, (0, block))]) for block in (0, 1, 2, 3, 0, 1)]
    for one in expected:
        wait_until(lambda: not through._running._jobs, "what there is room for")
        (wanted,) = one.blocks
        assert wanted.key in through._running._expected
        through.release(one)
        through.release(one)  # once is enough
    assert not through._running._expected
    first = through.prefetch([(source, (0, 4))])
    through.close()
    second = through.prefetch([(source, (0, 4))])
    through.release(first)  # of before
    assert list(through._running._expected) == [second.blocks[0].key]
    through.close()


def test_a_block_larger_than_the_room_is_fetched_alone(tmp_path: Path) -> None:
    source, through = Gated(), reader(tmp_path, 3000)
    source.gate.release(100)
    one, other = (through.prefetch([(source, (0, block))]) for block in range(2))
    wait_until(lambda: not through._running._jobs, "the first")
    assert source.fetched == [(0, True)]
    through.release(one)
    wait_until(lambda: not through._running._jobs, "the second")
    assert source.fetched == [(0, True), (1, True)]
    through.release(other)
    through.close()


def finished(through: BlockReader) -> None:
    wait_until(lambda: not through._running._jobs, "the end of all fetches")


def test_consumers_share_the_room_alike(tmp_path: Path) -> None:
    """A consumer at rest, such as training while validation runs, gives up what it needs last, and takes it again."""
    source, through = Gated(), reader(tmp_path, 4 * 4000)  # room for four blocks ahead
    source.gate.release(1000)
    train = [through.prefetch([(source, (0, block))], "train") for block in range(10)]
    finished(through)
    assert sorted(source.fetched) == [(block, True) for block in range(4)]
    val = [through.prefetch([(source, (0, block))], "val") for block in range(20, 30)]
    finished(through)
    assert sorted(source.fetched)[4:] == [(20, True), (21, True)]
    assert set(through._running._expected) == {f"gated/{block}" for block in (0, 1, 20, 21)}
    for number, one in enumerate(val[:6], 20):
        assert through.read(source, (0, number)) == bytes([number]) * 1000
        through.release(one)
        finished(through)
        assert sorted(source.fetched)[4:] == [(block, True) for block in range(20, min(number + 3, 30))]
    for one in reversed(val):  # the others are left
        through.release(one)
    finished(through)
    assert set(through._running._expected) == {f"gated/{block}" for block in range(4)}
    for number, one in enumerate(train):
        assert through.read(source, (0, number)) == bytes([number]) * 1000
        through.release(one)
        finished(through)
    assert sorted(source.fetched) == [(block, True) for block in (*range(10), *range(20, 28))]  # each once, all ahead
    assert (through._running._expected_bytes, through._running._expected, through._running._consumers) == (0, {}, {})
    through.close()


def test_consumers_share_the_connections_alike(tmp_path: Path) -> None:
    """Blocks that an idle consumer waits for do not delay those of an active one."""
    source, through = Gated(), reader(tmp_path, 4 * 8000, connections=1)
    train = [through.prefetch([(source, (0, block))], "train") for block in range(8)]
    wait_until(lambda: source.in_flight == 1, "the first fetch")
    val = [through.prefetch([(source, (0, block))], "val") for block in (20, 21)]
    source.gate.release(5)
    wait_until(lambda: len(source.fetched) == 5, "five fetches")
    assert source.fetched == [(block, True) for block in (0, 1, 20, 2, 21)]
    source.gate.release(100)
    for one in (*train, *val):
        through.release(one)
    through.close()


def test_a_block_of_two_consumers_is_fetched_once_and_for_both(tmp_path: Path) -> None:
    source, through = Gated(), reader(tmp_path, 4 * 4000, connections=1)
    expected = {name: [through.prefetch([(source, (0, n))], name) for n in (0, 1)] for name in ("one", "other")}
    wait_until(lambda: source.in_flight == 1, "the first fetch")
    for one in expected["one"]:
        through.release(one)
    source.gate.release(100)
    finished(through)
    assert source.fetched == [(0, True), (1, True)]
    assert set(through._running._expected) == {"gated/0", "gated/1"}
    for one in expected["other"]:
        through.release(one)
    assert not through._running._expected
    through.close()


@pytest.mark.parametrize("consumers", [2, 5])
def test_the_cache_bound_holds_for_any_order_of_consumers(tmp_path: Path, consumers: int) -> None:
    """Blocks of all sizes, shared and repeated, in any order: the bound holds but for a block each, and nothing is left."""

    class Sized(Gated):
        def size(self, block: tuple[int, int]) -> int:
            return 100 * (1 + block[1] % 9)

        def fetch(self, block: tuple[int, int], digest: bytes, cancel: threading.Event) -> bytes:
            return bytes([block[1]]) * self.size(block)

    source, through, rng = Sized(), reader(tmp_path, 4 * 4000), np.random.default_rng(consumers)
    opened: list[Prefetch] = []
    for _ in range(400):
        if opened and rng.random() < 0.5:
            one = opened.pop(int(rng.integers(len(opened))))
            for wanted in one.blocks[: int(rng.integers(4))]:
                assert through.read(source, wanted.block) == source.fetch(wanted.block, b"", threading.Event())
            through.release(one)
        else:
            blocks = rng.integers(0, 60, int(rng.integers(4))).tolist()
            opened.append(through.prefetch([(source, (0, n)) for n in blocks], int(rng.integers(consumers))))
        running = through._running
        with running._changed:
            held = {key for one in running._consumers.values() for key in one.blocks}
            assert held == set(running._expected)
            assert running._expected_bytes <= 4000 + 900 * consumers
            assert {key for one in running._consumers.values() for key in one.queue} <= held & set(running._jobs)
    for one in opened:
        through.release(one)
    finished(through)
    assert (through._running._expected_bytes, through._running._expected, through._running._consumers) == (0, {}, {})
    through.close()


def test_processes_share_the_room_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ranks do that have one folder: each alone would hold a fourth of it."""
    monkeypatch.setattr("arclight.data.remote.block_reader._COUNT_S", 0.0)
    source = Gated()
    source.gate.release(1000)
    readers = [reader(tmp_path, 4 * 12000) for _ in range(4)]  # room for twelve blocks ahead, in all
    idle = reader(tmp_path, 4 * 12000)
    idle.read(source, (0, 200))  # as a worker does, which fetches nothing ahead
    expected = []
    for number, through in enumerate(readers):
        expected.append([through.prefetch([(source, (0, 20 * number + block))]) for block in range(20)])
        finished(through)
    for through, ones in zip(readers, expected, strict=True):
        through.release(ones[0])
        finished(through)
    assert [through._running._expected_bytes for through in readers] == [3000] * 4
    held = [path for path in (tmp_path / ".holders").rglob("*") if path.is_file() and path.stat().st_nlink > 1]
    assert len(held) == 12
    for through in readers[1:3]:
        through.close()
    readers[0].release(expected[0][1])
    assert readers[0]._running._expected_bytes == 6000
    for through in (readers[0], readers[3], idle):
        through.close()


def _expect_and_die(folder: Path) -> None:
    source, through = Gated(), reader(folder, 4 * 4000)
    source.gate.release(10)
    through.prefetch([(source, (0, 0))])
    finished(through)
    os._exit(0)


def test_a_killed_process_leaves_its_share_of_the_room(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=_expect_and_die, args=(tmp_path,))
    process.start()
    process.join()
    assert list((tmp_path / ".holders").glob("*/ahead"))
    source, through = Gated(), reader(tmp_path, 4 * 4000)
    source.gate.release(10)
    expected = [through.prefetch([(source, (0, block))]) for block in range(8)]
    assert through._running._expected_bytes == 4000
    for one in expected:
        through.release(one)
    through.close()


class Told(Dataset[int]):
    """Samples 0 to 39, and what was expected, read and released, in order; read in a worker is not seen."""

    read_ahead = 3

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []
        self.consumers = set[Any]()

    def __len__(self) -> int:
        return 40

    def __getitem__(self, sample: int) -> int:
        self.log.append(("read", sample))
        return sample

    def prefetch(self, samples: list[int], consumer: Any) -> int:
        self.log.append(("expect", samples[0]))
        self.consumers.add(consumer)
        return samples[0]

    def release(self, expected: int) -> None:
        self.log.append(("release", expected))


def of(log: list[tuple[str, int]], kind: str) -> list[int]:
    return [sample for one, sample in log if one == kind]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("size", [4, 10])
def test_a_batch_is_released_once_it_was_read(workers: int, size: int) -> None:
    """Also of a pass whose batches are all in flight at once: workers need what they have not read yet."""
    data = Told()
    loader = ResumableLoader(DataLoader(data, size, collate_fn=identity, num_workers=workers))
    firsts = []
    for batch in loader.batches(0):
        firsts.append(batch[0])
        assert of(data.log, "release") == firsts  # before the step that uses it, so that threads fetch meanwhile
        ahead = max(1, 2 * workers) + data.read_ahead  # batches that are asked for, and those behind them
        assert len(of(data.log, "expect")) == min(40 // size, len(firsts) - 1 + (workers > 0) + ahead)
    assert of(data.log, "expect") == firsts
    assert len(data.consumers) == 1
    list(loader.batches(1))
    assert len(data.consumers) == 2  # a pass is one


@pytest.mark.parametrize("workers", [0, 2, pytest.param(-2, id="persistent")])
def test_a_pass_that_is_left_holds_nothing(workers: int) -> None:
    """As a look at the first batches of the validation set: what it had expected took the room of the training that followed."""
    data = Told()
    loader = ResumableLoader(
        DataLoader(data, 4, collate_fn=identity, num_workers=abs(workers), persistent_workers=workers < 0)
    )
    for started in (True, False):
        found = loader.batches(0)
        if started:
            next(found)
        elif workers:
            assert len(of(data.log, "expect")) > len(of(data.log, "release"))
        del found
        gc.collect()
        assert sorted(of(data.log, "release")) == sorted(of(data.log, "expect"))
    loader.close()


class Torn(Told):
    """One sample cannot be read."""

    def __getitem__(self, sample: int) -> int:
        if sample == 5:
            raise RemoteReadError("it is gone")
        return sample


@pytest.mark.parametrize("workers", [0, 2])
def test_reading_continues_after_an_error(workers: int) -> None:
    data = Torn()
    loader = DataLoader(data, 4, collate_fn=identity, num_workers=workers)
    found = ResumableLoader(loader, train=False).batches(0)
    next(found)
    with pytest.raises(RemoteReadError, match="it is gone"):
        next(found)
    assert next(found) == [8, 9, 10, 11]
    assert of(data.log, "release") == [0, 4, 8]
    assert len(list(found)) == 7  # to the end, where workers end


def test_a_pass_that_ends_with_the_process_releases_without_an_error(tmp_path: Path) -> None:
    source, through = Gated(), reader(tmp_path, 4 * 8000)  # room for eight
    expected = [through.prefetch([(source, (0, block))]) for block in range(12)]
    wait_until(lambda: source.in_flight == 3, "as many fetches as connections")
    running = through._running
    closing = threading.Thread(target=running.close)  # as the finalizer does, while the reader is there
    closing.start()
    wait_until(lambda: len(running._jobs) == 3, "the end of what waits")
    source.gate.release(100)
    closing.join(60)
    for one in expected:
        through.release(one)
    assert (len(running._threads), running._expected_bytes, running._open) == (3, 0, set())
    with pytest.raises(ReadCancelledError):
        through.read(source, (0, 7))
    through.close()


def test_threads_end_with_the_reader(local: TokenShards, tmp_path: Path) -> None:
    with serving(local.folder) as server:
        through = reader(tmp_path, patience_s=600.0)
        remote = RemoteTokenShards(server.address, through)
        server.fault = lambda *_: 503  # threads wait for better times
        remote.prefetch([(0, remote.tokens)], boundaries=True)
        wait_until(lambda: any(path.endswith(".tokens") for _, path in list(server.requests)), "the first request")
        assert read_ahead_threads()
        through.close()
        assert not read_ahead_threads()
        assert not list((tmp_path / ".holders").iterdir())
        server.fault = None
        assert (remote.read(0, 10) == local.read(0, 10)).all()  # and it can be taken up
        through.close()


def test_a_data_module_reads_an_address_as_a_folder(tmp_path: Path) -> None:
    from arclight.text import Text, TextDataModule
    from arclight.text.data.corpus import held_out, write_corpus
    from arclight.text.data.sources import Document
    from arclight.text.data.tokenizer import ByteTokenizer

    texts = [f"document {number} " * (1 + number % 9) for number in range(200)]
    documents = [Document(str(number), text, len(text)) for number, text in enumerate(texts)]
    write_corpus(tmp_path / "corpus", documents, ByteTokenizer(), split=held_out(0.2), shard_bytes=3000)
    found = []
    with serving(tmp_path / "corpus") as server:
        for place in (str(tmp_path / "corpus"), server.address):
            data = TextDataModule(Text(data=place, sequence_length=32, batch_size=4, cache=tmp_path / "cache"))
            data.prepare_data()
            data.setup("fit")
            found.append(
                [
                    list(ResumableLoader(loader).batches(0))
                    for loader in (data.train_dataloader(), data.val_dataloader())
                ]
            )
            data.teardown("fit")
    assert not read_ahead_threads()
    assert all(same(here, there) for here, there in zip(*found, strict=True))


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of 3 MB, in 2 bytes a token: more than the smallest folder."""
    from arclight.text.data.corpus import held_out, write_corpus
    from arclight.text.data.sources import Document
    from arclight.text.data.tokenizer import ByteTokenizer

    texts = [(f"document {number} " * 1000)[:7000] for number in range(210)]
    documents = [Document(str(number), text, len(text)) for number, text in enumerate(texts)]
    folder = tmp_path_factory.mktemp("large") / "corpus"
    write_corpus(folder, documents, ByteTokenizer(), split=held_out(0.02), shard_bytes=300_000)
    return folder


def test_validation_within_an_epoch_is_read_ahead(large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where what training expects fills the room."""
    fetch, fetched = ShardBlocks.fetch, list[str]()

    def noted(self: ShardBlocks, block: tuple[int, int], digest: bytes, cancel: threading.Event) -> bytes:
        if not threading.current_thread().name.startswith("arclight-read-ahead"):
            fetched.append(self.key(block))
        return fetch(self, block, digest, cancel)

    monkeypatch.setattr(ShardBlocks, "fetch", noted)
    here = write(tmp_path / "val", seed=1)
    through = reader(tmp_path / "blocks", 2**21)  # room for eight blocks ahead
    train, val = (
        TokenSamples([Windows(RemoteTokenShards(f"file://{folder}", through), 2048)], np.ones(VOCAB, np.int64))
        for folder in (large / "train", tmp_path / "val")
    )
    loaders = [
        ResumableLoader(DataLoader(data, 4, sampler=EpochOrder(len(data), shuffle=data is train), collate_fn=identity))
        for data in (train, val)
    ]
    training = loaders[0].batches(0)
    next(training)
    finished(through)
    validation = loaders[1].batches(0)
    found = [next(validation)]
    fetched.clear()
    for _ in range(len(val) // 4 - 1):
        finished(through)
        found.append(next(validation))
    assert not fetched
    assert len(through._running._consumers) == 2
    del validation
    assert len(through._running._consumers) == 1
    finished(through)
    next(training)
    assert not fetched
    del training
    assert not through._running._consumers
    through.close()
    assert all(
        torch.equal(batch["tokens"].flatten(), torch.from_numpy(here.read(8192 * n, 8192 * (n + 1)).astype(np.int64)))
        for n, batch in enumerate(found)
    )


@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.slow), 64])
def test_a_window_of_the_shuffle_fetches_the_corpus_once(
    large: Path, tmp_path: Path, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from arclight.text import Text, TextDataModule

    def counted(self: ShardBlocks, block: tuple[int, int], digest: bytes, cancel: threading.Event) -> bytes:
        fetched.append(self.size(block))
        return fetch(self, block, digest, cancel)

    fetch, fetched, found = ShardBlocks.fetch, list[int](), []
    monkeypatch.setattr("arclight.data.remote.block_reader._IN_MEMORY", 2)
    monkeypatch.setattr(ShardBlocks, "fetch", counted)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for place in (str(large), f"file://{large}"):
            settings = Text(
                data=place,
                sequence_length=2048,
                batch_size=4,
                cache=tmp_path,
                remote_bytes=2**20,
                shuffle_window=window,
            )
            data = TextDataModule(settings)
            data.prepare_data()
            data.setup("fit")
            found.append(list(ResumableLoader(data.train_dataloader(), seed=3).batches(0)))
            data.teardown("fit")
    assert same(*found)
    size = sum(path.stat().st_size for path in (large / "train").glob("*.tokens"))
    warned = [str(one.message) for one in told if "shuffle_window" in str(one.message)]
    if window is None:
        assert sum(fetched) > 5 * size
        assert len(warned) == 1
        assert "an epoch fetches up to" in warned[0]
    else:
        assert sum(fetched) < 2 * size
        assert not warned


def test_packed_files_count_towards_the_bound(large: Path, tmp_path: Path) -> None:
    from arclight.data.remote.block_folder import MADE
    from arclight.text import Text, TextDataModule

    settings = Text(
        data=f"file://{large}", sequence_length=64, batch_size=64, cache=tmp_path, remote_bytes=2**20, packing="pack"
    )
    data = TextDataModule(settings)
    data.prepare_data()
    assert sum(path.stat().st_size for path in (tmp_path / "remote" / MADE).rglob("*") if path.is_file()) > 2**18
    assert stored(tmp_path / "remote") <= 2**20
    data.setup("fit")
    loader = ResumableLoader(data.train_dataloader(), seed=3)
    for _, _batch in zip(range(10), loader.batches(0), strict=False):
        assert stored(tmp_path / "remote") <= 2**20
    data.teardown("fit")
    (tmp_path / "remote" / MADE / "padding").write_bytes(bytes(2**20))
    with pytest.raises(ValueError, match=r"leaves no room for blocks.*which needs none$"):
        data.prepare_data()


def test_packed_files_of_other_runs_are_listed(large: Path, tmp_path: Path) -> None:
    from arclight.data.remote.block_folder import MADE
    from arclight.text import Text, TextDataModule

    def prepare(length: int) -> None:
        settings = Text(
            data=f"file://{large}", sequence_length=length, cache=tmp_path, remote_bytes=2**20, packing="pack"
        )
        data = TextDataModule(settings)
        data.prepare_data()
        data.prepare_data()  # again: it is there
        data.teardown("fit")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepare(64)
    with pytest.warns(UserWarning, match=r"packed for other runs takes room of blocks, .*packed-64 \([\d,]+ bytes\)"):
        prepare(72)
    with pytest.raises(ValueError, match=r"leaves no room for blocks.*packed-64 .*packed-72 "):
        prepare(48)
    for folder in (tmp_path / "remote" / MADE).glob("*/packed-*"):
        if not folder.name.endswith("-48"):
            shutil.rmtree(folder)
    prepare(48)


def test_an_address_is_inspected_like_a_folder(large: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from arclight.cli.command import main

    said = []
    for place in (str(large), f"file://{large}"):
        assert main(["data", "inspect", place, "--json", "--verify"]) == 0
        said.append(json.loads(capsys.readouterr().out))
    assert main(["data", "inspect", f"file://{large}/train"]) == 0
    assert main(["data", "inspect", f"file://{large}", "--sums"]) == 2
    assert "is an address" in capsys.readouterr().err
    assert main(["data", "inspect", f"file://{large}/nothing"]) == 2
    assert said[0] == said[1]
    assert said[0]["splits"]["train"]["unigrams"]["sources"]


def test_a_missing_file_system_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def gone(protocol: str, **_: Any) -> Any:
        raise ImportError(protocol)

    monkeypatch.setattr("fsspec.filesystem", gone)
    for address, extra in (("https://host/corpus", "http"), ("s3://bucket/corpus", "s3")):
        with pytest.raises(RemoteReadError, match=rf"\[{extra}\]"):
            RemoteTokenShards(address, reader(tmp_path))
