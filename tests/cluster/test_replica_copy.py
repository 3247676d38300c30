"""A broker that the stream has left behind copies the sealed files of another one."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import pytest

from penstock.cluster import copying
from penstock.cluster.copying import PeerFailed
from penstock.storage.log import WalOptions
from penstock.storage.manifest import MANIFEST_NAME
from tests.cluster.replicas import Node, ReplicaWorld, files_of
from tests.storage.faulty_vfs import FLAVOURS

STRIDE = 7
TINY = WalOptions(segment_bytes=16 * 1024, reserve_bytes=0)


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "PAUSE_S", 0.0)
    monkeypatch.setattr(copying, "CHUNK_BYTES", 1000)


@pytest.fixture
def world() -> Iterator[ReplicaWorld]:
    world = ReplicaWorld(options=TINY)
    yield world
    world.close()


@pytest.fixture
def a(world: ReplicaWorld) -> Node:
    """The owner. What it has sealed is no longer in the stream, and node b was away."""
    node = world.must_promote("a")
    world.must(node.engine.create_topic, "t", 1)
    world["b"].kill()
    fill(world, node, 0, 40)
    seal(world, node)
    fill(world, node, 40, 50)
    world.stream.drop_before(node.replica.sealed_seq() + 1)
    return node


@pytest.fixture
def b(world: ReplicaWorld) -> Node:
    return world["b"]


def fill(world: ReplicaWorld, node: Node, first: int, end: int) -> None:
    for number in range(first, end):
        world.produce(node, value(number))


def value(number: int) -> str:
    return f"v{number} ".ljust(600, "x")


def seal(world: ReplicaWorld, node: Node) -> None:
    before = node.replica.sealed_seq()
    node.engine.parts.log.roll()
    world.simulation.wait_until(lambda: node.replica.sealed_seq() > before)
    world.simulation.pass_ms(1500)


def has_caught_up(node: Node, owner: Node) -> bool:
    return node.replica.standby is not None and node.replica.position() == owner.replica.position()


def wait_for_copy(world: ReplicaWorld, node: Node, owner: Node) -> None:
    world.simulation.wait_until(lambda: has_caught_up(node, owner), most_ms=200_000)
    assert node.image() == owner.image()


def test_a_new_broker_copies_and_follows(world: ReplicaWorld, a: Node, b: Node) -> None:
    assert a.replica.sealed_seq() > 30
    b.start()
    wait_for_copy(world, b, a)
    fill(world, a, 50, 55)
    wait_for_copy(world, b, a)
    a.kill()
    world.must_promote("b")
    assert world.values(b) == [value(number) for number in range(55)]
    world.produce(b, "new")


def test_a_copy_seals_and_is_copied_in_its_turn(world: ReplicaWorld, a: Node, b: Node) -> None:
    b.start()
    wait_for_copy(world, b, a)
    world.must_promote("b")
    fill(world, b, 50, 90)
    seal(world, b)
    b.restart()
    world.must_promote("b")
    a.kill()
    for path in [p for p in a.vfs.paths() if p.startswith("/a")]:
        a.vfs.unlink(path)
    world.stream.drop_before(b.replica.sealed_seq() + 1)
    a.start()
    wait_for_copy(world, a, b)
    world.must_promote("a")
    assert world.values(a) == [value(number) for number in range(90)]


def test_a_broker_that_was_away_for_long_replaces_its_files(
    world: ReplicaWorld, a: Node, b: Node
) -> None:
    b.start()
    wait_for_copy(world, b, a)
    b.kill()
    fill(world, a, 50, 100)
    seal(world, a)
    world.stream.drop_before(a.replica.sealed_seq() + 1)
    b.start()
    wait_for_copy(world, b, a)
    world.must_promote("b")
    assert world.values(b) == [value(number) for number in range(100)]


@pytest.mark.parametrize("reads", [1, 2, 5, 10, 20, 40])
def test_the_other_broker_seals_meanwhile(
    world: ReplicaWorld, a: Node, b: Node, reads: int
) -> None:
    """Its old snapshot is gone then, and the copy goes on with the new manifest."""
    before = files_of(a)
    fill(world, a, 50, 70)
    seal(world, a)
    left = [reads]

    def found(node: Node) -> dict[str, bytes]:
        left[0] -= 1
        return before if left[0] >= 0 else files_of(node)

    world.files_of = found
    b.start()
    wait_for_copy(world, b, a)
    world.must_promote("b")
    assert world.values(b) == [value(number) for number in range(70)]


def test_a_copy_goes_on_where_it_was_broken_off(world: ReplicaWorld, a: Node, b: Node) -> None:
    reads: list[str] = []

    def before_read(node: Node, name: str) -> None:
        reads.append(name)
        if 15 <= len(reads) < 30:
            raise PeerFailed("no connection")

    world.before_read = before_read
    b.start()
    wait_for_copy(world, b, a)
    begun = set(reads[:14]) - {reads[14], MANIFEST_NAME}
    assert begun, "some file was whole by then"
    assert not begun & set(reads[30:]), "what is here is not read again"


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_crash_at_any_call_leaves_the_old_copy_or_the_new_one(flavour: str) -> None:
    """Every call to the disk of the copying broker is its last one once."""
    step = 1
    installed = 0
    while step:
        world = ReplicaWorld(options=TINY)
        try:
            owner = world.must_promote("a")
            world.must(owner.engine.create_topic, "t", 1)
            world.simulation.pass_ms(20)
            b = world["b"]
            b.kill()
            fill(world, owner, 0, 30)
            seal(world, owner)
            world.stream.drop_before(owner.replica.sealed_seq() + 1)
            b.vfs.fail_call(step, errno.EIO, then_all_after=0)
            try:
                b.start()
                world.simulation.pass_ms(50)
            except OSError:
                pass
            hit = b.vfs.faults_hit
            b.crash(flavour, step)
            installed += b.vfs.exists("/b.copy/MANIFEST.install")
            b.start()
            wait_for_copy(world, b, owner)
            world.must_promote("b")
            assert world.values(b) == [value(number) for number in range(30)]
        finally:
            world.close()
        step = step + STRIDE if hit else 0
    print(installed)


def test_a_damaged_file_is_not_taken_over(world: ReplicaWorld, a: Node, b: Node) -> None:
    path = next(p for p in a.vfs.paths() if "history" in p)
    data = a.vfs.content(path)
    a.vfs.plant(path, data[:-50] + bytes([data[-50] ^ 1]) + data[-49:])
    b.start()
    world.simulation.pass_ms(2000)
    assert "checksum" in str(b.replica.failure)
    assert not b.replica.is_caught_up()
    a.vfs.plant(path, data)
    wait_for_copy(world, b, a)


def test_a_full_disk_refuses_the_copy_and_keeps_the_old_files(
    world: ReplicaWorld, a: Node, b: Node
) -> None:
    b.vfs.capacity_bytes = 20_000
    b.start()
    world.simulation.pass_ms(500)
    assert "make room" in str(b.replica.failure)
    b.vfs.capacity_bytes = 1 << 40
    wait_for_copy(world, b, a)


def test_a_peer_whose_files_end_too_early_is_not_copied(world: ReplicaWorld, a: Node) -> None:
    b = world["b"]
    world.stream.drop_before(a.replica.position())
    b.start()
    world.simulation.pass_ms(500)
    assert "end before message" in str(b.replica.failure)
