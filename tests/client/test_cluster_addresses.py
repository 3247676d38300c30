"""A client with several addresses: which broker it asks, and how it goes on when one is away.

Most tests have two proxies before one broker, and cut one of them: to the client that is a cluster
whose brokers share everything. The last ones have a cluster of brokers on NATS, and kill its owner.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx
import pytest

from penstock.client import AsyncClient, AsyncWorker, Client, Delivery, Envelope, Worker
from penstock.client.addresses import MAP_PATH
from penstock.client.sync import Deliveries
from penstock.model.errors import (
    InvalidArgument,
    NotFound,
    OutcomeUnknown,
    OutOfRange,
    Unavailable,
)
from tests.broker_process import PROMPT_S, BrokerProcess, eventually
from tests.cluster.cluster_process import ClusterProcess, MemberProcess, shared_nats
from tests.tcp_proxy import TcpProxy, tcp_proxy
from tests.tls_proxy import Certificate, tls_proxy

WAIT_S = 60.0
LEASE_MS = 5000
"""So that what does not come fails a test instead of holding it up."""


@pytest.fixture
def near(broker: BrokerProcess) -> Iterator[TcpProxy]:
    """The address that the client prefers."""
    with tcp_proxy(broker.port) as proxy:
        yield proxy


@pytest.fixture
def far(broker: BrokerProcess) -> Iterator[TcpProxy]:
    with tcp_proxy(broker.port) as proxy:
        yield proxy


@pytest.fixture
def urls(near: TcpProxy, far: TcpProxy) -> str:
    return f"{near.url},{far.url}"


@pytest.fixture
def roaming(urls: str) -> Iterator[Client]:
    with Client(urls, timeout_s=WAIT_S) as client:
        yield client


class Recorder(httpx.HTTPTransport):
    """Notes what is sent where, and sends it."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[str] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.sent.append(
            f"{request.method} {request.url.host}:{request.url.port}{request.url.path}"
        )
        return super().handle_request(request)


# -- requests --------------------------------------------------------------------------------------


def test_with_one_address_nothing_more_is_sent(broker: BrokerProcess, topic: str) -> None:
    recorder = Recorder()
    with Client(broker.url, transport=recorder) as client:
        client.produce(topic, "a")
        client.describe_topic(topic)
        for each in client.consume(topic, "g", wait_s=0.2):
            client.ack(each)
    paths = [each.split("/", 1)[1] for each in recorder.sent]
    assert paths == ["v1/produce", f"v1/topics/{topic}", "v1/consume", "v1/ack"]


def test_with_several_the_map_is_read_once_before_the_first_request(urls: str, topic: str) -> None:
    recorder = Recorder()
    with Client(urls, transport=recorder) as client:
        for _ in range(3):
            client.produce(topic, "a")
    assert [each.split("/", 1)[1] for each in recorder.sent] == [MAP_PATH[1:]] + ["v1/produce"] * 3


def test_a_write_that_was_not_sent_goes_to_another_address_at_once(
    roaming: Client, near: TcpProxy, topic: str
) -> None:
    roaming.produce(topic, "a")
    near.close()
    before = time.monotonic()
    roaming.produce(topic, "b")
    assert time.monotonic() - before < PROMPT_S
    assert [row["value"] for row in roaming.read_range(topic, 0)] == ["a", "b"]


def test_a_first_address_that_is_away_is_no_error(broker: BrokerProcess, topic: str) -> None:
    with Client(f"http://127.0.0.1:1,{broker.url}") as client:
        assert client.produce(topic, "a").offset == 0


def test_if_all_addresses_are_away_the_error_names_them() -> None:
    with (
        Client("http://127.0.0.1:1,http://127.0.0.1:2") as client,
        pytest.raises(Unavailable) as error,
    ):
        client.list_topics()
    assert not isinstance(error.value, OutcomeUnknown)
    assert "http://127.0.0.1:1, http://127.0.0.1:2" in error.value.message


def test_a_write_whose_connection_breaks_is_not_sent_again(
    roaming: Client, near: TcpProxy, topic: str
) -> None:
    """The broker has executed it, so that a second one would be there twice."""
    roaming.describe_topic(topic)
    near.hold_answers()
    with ThreadPoolExecutor() as pool:
        writing = pool.submit(roaming.produce, topic, "once")
        with Client(near_of(roaming, 1)) as other:
            eventually(lambda: other.describe_topic(topic).partitions[0].next_offset)
        near.cut()
        with pytest.raises(OutcomeUnknown, match="not sent again"):
            writing.result(WAIT_S)
    assert [row["value"] for row in roaming.read_range(topic, 0)] == ["once"]


def test_a_read_whose_connection_breaks_is_sent_again(
    roaming: Client, near: TcpProxy, topic: str
) -> None:
    roaming.produce(topic, "a")
    near.hold_answers()
    with ThreadPoolExecutor() as pool:
        reading = pool.submit(roaming.describe_topic, topic)
        assert not reading.done()
        time.sleep(0.05)  # Sooner, it would be a connection that is refused: also fine.
        near.cut()
        assert reading.result(WAIT_S).name == topic


def test_a_refusal_is_an_answer_and_is_not_asked_for_elsewhere(urls: str) -> None:
    recorder = Recorder()
    with Client(urls, transport=recorder) as client, pytest.raises(NotFound):
        client.describe_topic("nowhere")
    assert len(recorder.sent) == 2, "the map, and the request"


def test_the_environment_may_name_several_addresses(
    urls: str, near: TcpProxy, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_URL", urls)
    near.close()
    with Client() as client:
        client.produce(topic, "a")


def test_tls_and_the_token_hold_for_all_addresses(
    certificate: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate.file))
    env = {"PENSTOCK_TOKEN": "a-secret-of-the-test"}
    with BrokerProcess(None, env=env) as guarded, tls_proxy(guarded.port, certificate) as url:
        with Client(f"https://127.0.0.1:1,{url}", token=env["PENSTOCK_TOKEN"]) as client:
            client.create_topic("t")
            assert client.list_topics() == ["t"]
            with client.connect() as socket:
                assert socket.is_connected
        monkeypatch.delenv("SSL_CERT_FILE")
        with Client(f"https://127.0.0.1:1,{url}") as client, pytest.raises(InvalidArgument):
            client.list_topics()


# -- streams ---------------------------------------------------------------------------------------


def test_a_consume_stream_goes_on_at_the_next_address(
    roaming: Client, near: TcpProxy, topic: str
) -> None:
    roaming.produce(topic, "a")
    with roaming.consume(topic, "g", wait_s=WAIT_S) as stream:
        first = next(stream)
        near.close()
        roaming.produce(topic, "b")
        second = next(stream)
        assert [first.value, second.value] == ["a", "b"]
        assert stream.resumed == 1
        # Under the same owner, so that what came before can still be acked.
        assert roaming.ack_batch([first, second]) == [None, None]


def test_a_consume_stream_of_one_address_ends_as_before(near: TcpProxy, topic: str) -> None:
    with Client(near.url) as client, client.consume(topic, "g", wait_s=WAIT_S) as stream:
        near.cut()
        with pytest.raises(Unavailable):
            next(stream)


def test_an_async_stream_goes_on_and_can_be_closed_meanwhile(
    urls: str, near: TcpProxy, far: TcpProxy, topic: str
) -> None:
    async def play() -> tuple[str, bool]:
        async with AsyncClient(urls) as client, client.consume(topic, "g") as stream:
            near.close()
            await client.produce(topic, "a")
            found = await anext(stream)
            far.cut()
            waiting = asyncio.create_task(anext(stream, None))
            await asyncio.sleep(0.1)
            await stream.close()
            ended = await asyncio.wait_for(waiting, WAIT_S) is None
            return found.value, ended

    assert asyncio.run(play()) == ("a", True)


def test_a_stream_that_ends_again_and_again_is_not_opened_in_a_tight_loop(
    near: TcpProxy, far: TcpProxy, topic: str
) -> None:
    recorder = Recorder()
    with Client(f"{near.url},{far.url}", transport=recorder) as client:
        stream = client.consume(topic, "g", wait_s=2.0).open()
        ends = threading.Event()

        def cut_always() -> None:
            while not ends.wait(0.005):
                for proxy in (near, far):
                    proxy.cut()
                    proxy.allow()

        cutting = threading.Thread(target=cut_always)
        cutting.start()
        try:
            # It ends in one way or the other, depending on what it was doing at that moment.
            with suppress(Unavailable):
                list(stream)
        finally:
            ends.set()
            cutting.join()
    opened = [each for each in recorder.sent if "/v1/consume" in each]
    assert 2 < len(opened) < 40


def test_a_topic_that_was_deleted_ends_the_stream(roaming: Client, topic: str) -> None:
    with roaming.consume(topic, "g", wait_s=WAIT_S) as stream:
        roaming.delete_topic(topic)
        assert list(stream) == []
        assert not stream.timed_out


def test_a_live_subscription_goes_on_and_counts_the_gap(
    roaming: Client, near: TcpProxy, broker: BrokerProcess
) -> None:
    with roaming.stream("default").subscribe(wait_s=WAIT_S) as events, Client(broker.url) as other:
        other.stream("default").publish("a")
        assert (next(events), events.gaps) == (b"a", 0)
        near.cut()
        ends = threading.Event()

        def publish() -> None:
            while not ends.wait(0.01):
                other.stream("default").publish("b")

        publishing = threading.Thread(target=publish)
        publishing.start()
        try:
            assert (next(events), events.gaps) == (b"b", 1)
        finally:
            ends.set()
            publishing.join()


def test_a_watch_goes_on_with_a_gap_if_there_was_a_change(
    roaming: Client, near: TcpProxy, far: TcpProxy, broker: BrokerProcess
) -> None:
    with (
        roaming.cache("default").watch(prefix="", wait_s=WAIT_S) as watch,
        Client(broker.url) as other,
    ):
        other.cache("default").put("k", "1")
        assert next(watch).value == b"1"
        near.cut()
        far.hold()
        other.cache("default").put("k", "2")
        far.release()
        assert next(watch).event == "gap"
        other.cache("default").put("k", "3")
        assert next(watch).value == b"3"


@pytest.fixture(scope="module")
def durable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """A broker that keeps events."""
    with (
        BrokerProcess(tmp_path_factory.mktemp("broker") / "data") as process,
        Client(process.url) as client,
    ):
        client.create_stream("default", "default", "log", delivery="at_least_once")
        yield process


@pytest.mark.parametrize("name", [None, "billing"])
def test_a_durable_subscription_goes_on_without_a_gap_or_a_repeat(
    durable: BrokerProcess, name: str | None
) -> None:
    with (
        tcp_proxy(durable.port) as near,
        Client(f"{near.url},{durable.url}") as roaming,
        Client(durable.url) as other,
    ):
        begin = other.stream("log").publish("0")
        assert begin is not None
        with roaming.stream("log").events(name=name, start=begin, wait_s=WAIT_S) as events:
            seen = [next(events)]
            for number in range(1, 20):
                if number % 5 == 0:
                    near.cut()
                    near.allow()
                other.stream("log").publish(str(number))
                seen.append(next(events))
            assert [int(each.payload) for each in seen] == list(range(20))
            if name is not None:
                for each in seen:
                    each.ack()


def test_a_durable_subscription_does_not_go_on_in_a_stream_of_the_same_name(
    durable: BrokerProcess,
) -> None:
    """Its offsets mean other events."""
    with (
        tcp_proxy(durable.port) as near,
        tcp_proxy(durable.port) as far,
        Client(f"{near.url},{far.url}") as roaming,
        Client(durable.url) as other,
    ):
        other.create_stream("default", "default", "again", delivery="at_least_once")
        other.stream("again").publish("old")
        with roaming.stream("again").events(start="earliest", wait_s=WAIT_S) as events:
            assert next(events).payload == b"old"
            for proxy in (near, far):
                proxy.cut()
            other.delete_stream("default", "default", "again")
            other.create_stream("default", "default", "again", delivery="at_least_once")
            for number in range(3):
                other.stream("again").publish(str(number))
            for proxy in (near, far):
                proxy.allow()
            with pytest.raises(OutOfRange):
                next(events)


# -- workers and sockets ---------------------------------------------------------------------------


def test_a_worker_goes_on_at_the_next_address(urls: str, near: TcpProxy, topic: str) -> None:
    done: list[str] = []
    with Client(urls) as client:

        def handle(delivery: Delivery) -> None:
            done.append(delivery.value)
            if delivery.value == "a":
                near.close()
            else:
                worker.stop()

        worker = Worker(client, topic, "g", handle)
        for value in ("a", "b"):
            client.produce(topic, value)
        with ThreadPoolExecutor() as pool:
            pool.submit(worker.run).result(WAIT_S)
        assert done == ["a", "b"]
        assert list(client.consume(topic, "g", wait_s=0.2)) == [], "both are acked"


def test_an_async_worker_goes_on_at_the_next_address(urls: str, near: TcpProxy, topic: str) -> None:
    done: list[str] = []

    async def play() -> None:
        async with AsyncClient(urls) as client:

            async def handle(delivery: Delivery) -> None:
                done.append(delivery.value)
                if delivery.value == "a":
                    near.close()
                    await client.produce(topic, "b")
                else:
                    worker.stop()

            worker = AsyncWorker(client, topic, "g", handle)
            await client.produce(topic, "a")
            await asyncio.wait_for(worker.run(), WAIT_S)

    asyncio.run(play())
    assert done == ["a", "b"]


def test_a_socket_goes_on_at_the_next_address(roaming: Client, near: TcpProxy) -> None:
    with roaming.connect() as socket, socket.stream("default").subscribe(wait_s=WAIT_S) as events:
        socket.stream("default").publish("a")
        assert next(events) == b"a"
        near.close()
        eventually(lambda: socket.reconnects, lambda times: times == 1)
        eventually(lambda: events.subscription_id)
        socket.stream("default").publish("b")
        assert next(events) == b"b"
        socket.cache("default").put("k", "v")


def near_of(client: Client, number: int) -> str:
    return client.url.split(",")[number]


# -- a cluster on NATS -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcess]:
    directory = tmp_path_factory.mktemp("cluster")
    with ClusterProcess(shared_nats(), directory, count=3) as cluster:
        for each in cluster.brokers:
            each.keep_port()
        yield cluster


@pytest.fixture
def whole(cluster: ClusterProcess) -> ClusterProcess:
    """The cluster with all its brokers, also after a test that has killed one."""
    for each in cluster.brokers:
        if not each.is_running():
            each.start()
    cluster.wait_until_whole()
    return cluster


def urls_of(cluster: ClusterProcess) -> str:
    """All addresses, the owner's last."""
    owner = cluster.owner()
    others = [each.url for each in cluster.brokers if each is not owner]
    return ",".join([*others, owner.url])


def forwarded(broker: MemberProcess) -> float:
    for line in broker.client.get("/metrics").text.splitlines():
        if line.startswith("penstock_forwarded_total"):
            return float(line.split()[-1])
    raise AssertionError("no metric counts what is forwarded")


def test_requests_streams_and_sockets_go_straight_to_the_owner(whole: ClusterProcess) -> None:
    others = [each for each in whole.brokers if each is not whole.owner()]
    before = [forwarded(each) for each in others]
    with Client(urls_of(whole)) as client:
        client.create_topic("straight")
        client.produce("straight", "a")
        assert [each.value for each in client.consume("straight", "g", wait_s=0.5)] == ["a"]
        with client.connect() as socket:
            socket.cache("default").put("k", "v")
    assert [forwarded(each) for each in others] == before


def test_one_given_address_of_two_is_enough_to_find_the_owner(whole: ClusterProcess) -> None:
    """It learns the third one's from the map."""
    owner, (one, two) = whole.owner(), [each for each in whole.brokers if each is not whole.owner()]
    before = [forwarded(each) for each in (one, two)]
    with Client(f"{one.url},{two.url}") as client:
        client.list_topics()
    assert [forwarded(each) for each in (one, two)] == before
    assert owner is whole.owner()


def test_nothing_is_lost_or_repeated_while_the_owner_is_killed(whole: ClusterProcess) -> None:
    """A producer, a consume stream, a worker and a socket at once."""
    urls, got, worked = urls_of(whole), set[str](), list[str]()
    with Client(urls, timeout_s=WAIT_S) as client, ThreadPoolExecutor() as pool:
        client.create_topic("killed")
        # What was under way to a consumer that never got it comes again when its lease ends.
        worker = Worker(
            client, "killed", "workers", lambda each: worked.append(each.value), lease_ms=LEASE_MS
        )
        working = pool.submit(worker.run)
        reading = pool.submit(read_all, urls, "killed", got)
        with client.connect() as socket:
            for number in range(200):
                if number == 100:
                    whole.owner().kill()
                produce_once(client, "killed", number)
            eventually(lambda: socket.is_connected, timeout_s=WAIT_S)
            socket.cache("default").put("after", "the kill")
        client.produce("killed", "end")
        reading.result(WAIT_S)
        eventually(lambda: len(set(worked)) == 201, timeout_s=WAIT_S)
        worker.stop()
        working.result(WAIT_S)
        stored = [row["value"] for row in client.read_range("killed", 0)]
    expected = [str(number) for number in range(200)] + ["end"]
    assert stored == expected
    assert got == set(worked) == set(expected)


def produce_once(client: Client, topic: str, number: int) -> None:
    """Produces until there is an answer. The key lets the broker refuse what it has already."""
    while True:
        try:
            client.produce(topic, str(number), envelope=Envelope(idempotency_key=str(number)))
            return
        except Unavailable:
            time.sleep(0.01)


def open_readers(client: Client, topic: str) -> Deliveries:
    return client.consume(topic, "readers", lease_ms=LEASE_MS)


def read_all(urls: str, topic: str, got: set[str]) -> None:
    with Client(urls, timeout_s=WAIT_S) as client, open_readers(client, topic) as stream:
        for each in stream:
            while True:
                try:
                    client.ack(each)
                    break
                except Unavailable:
                    time.sleep(0.01)
            got.add(each.value)
            if len(got) == 201:
                return


def test_an_async_client_goes_on_when_the_owner_hands_over(whole: ClusterProcess) -> None:
    """The stream ends with a reason, and continues at the next owner."""
    successor = whole.standby()

    async def play() -> tuple[list[str], int]:
        async with AsyncClient(urls_of(whole)) as client:
            await client.create_topic("moved")
            await client.produce("moved", "a")
            async with client.consume("moved", "g", wait_s=WAIT_S) as stream:
                first = await anext(stream)
                await client.move_shard(successor.name)
                await client.produce("moved", "b")
                second = await anext(stream)
                await client.ack_batch([first, second])
                return [first.value, second.value], stream.resumed

    assert asyncio.run(play()) == (["a", "b"], 1)
    assert whole.owner() is successor
