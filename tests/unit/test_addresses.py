"""Which of its addresses a client uses, on a clock of the test's own."""

from __future__ import annotations

import json

import pytest

from penstock.client.addresses import (
    FIRST_AVOIDED_S,
    FIRST_MAP_PAUSE_S,
    LONGEST_AVOIDED_S,
    LONGEST_MAP_PAUSE_S,
    MAP_AGE_S,
    MOST_TRIED,
    AddressBook,
)
from penstock.client.credentials import DEFAULT_URL
from penstock.model.errors import InvalidArgument

A, B, C = "http://a:8080", "http://b:8080", "http://c:8080"


class Book(AddressBook):
    """A book whose time the test tells."""

    def __init__(self, text: str) -> None:
        self.now = 100.0
        super().__init__(text, lambda: self.now)

    def told(self, owner: str, epoch: int = 1, *others: str, state: str = "standby") -> None:
        """A broker answers with this map."""
        brokers = [{"name": each, "url": each, "state": state} for each in others]
        shards = [{"url": owner, "epoch": epoch}] if owner else []
        body = {"name": "b1", "brokers": brokers, "shards": shards}
        assert self.begin_reading()
        assert self.learn(200, json.dumps(body).encode())
        self.end_reading()


def test_commas_separate_addresses_and_each_counts_once() -> None:
    assert AddressBook(f" {A}/ , {B},{A},").given == (A, B)


@pytest.mark.parametrize(
    "text",
    ["", " , ", "a:8080", f"{A},b:8080", "ftp://a", "http://", f"{A},http://[b", "http://a:x"],
)
def test_what_is_no_address_is_refused_by_name(text: str) -> None:
    with pytest.raises(
        InvalidArgument, match="no broker's address; an address looks like"
    ) as error:
        AddressBook(text)
    assert DEFAULT_URL in str(error.value)


def test_addresses_with_and_without_tls_are_refused_together() -> None:
    with pytest.raises(InvalidArgument, match="the same scheme"):
        AddressBook(f"{A},https://b")


def test_one_address_never_asks_for_the_map() -> None:
    assert not Book(A).begin_reading()


def test_the_owner_comes_first_then_the_last_that_answered_then_the_rest() -> None:
    book = Book(f"{A},{B}")
    assert book.next() == A
    book.answered(B)
    assert book.next() == B
    book.told(C, 1, A, C)
    assert [book.next(tried) for tried in ([], [C], [C, B], [C, B, A])] == [C, B, A, None]


def test_an_address_that_failed_is_left_alone_twice_as_long_each_time() -> None:
    book = Book(f"{A},{B}")
    length = FIRST_AVOIDED_S
    while length < LONGEST_AVOIDED_S:
        book.failed(A)
        book.now += length * 0.99
        assert book.next() == B
        book.now += length * 0.01
        assert book.next() == A
        length *= 2
    for _ in range(3):
        book.failed(A)
    book.now += LONGEST_AVOIDED_S
    assert book.next() == A
    book.failed(A)
    book.answered(A)
    assert book.next() == A


def test_an_address_that_failed_is_used_if_there_is_no_other() -> None:
    book = Book(f"{A},{B}")
    book.failed(A)
    book.now += 0.1
    book.failed(B)
    assert book.next() == A
    assert book.next([A]) == B


def test_an_owner_that_failed_is_used_again_when_it_becomes_the_owner_anew() -> None:
    book = Book(f"{A},{B}")
    book.told(A, 7)
    book.failed(A)
    book.now += FIRST_MAP_PAUSE_S / 10
    book.told(A, 7)
    assert book.next() == B, "the map is older than the failure"
    book.now += FIRST_MAP_PAUSE_S
    book.told(A, 8)
    assert book.next() == A


@pytest.mark.parametrize(
    "url",
    [
        "http://evil:8080",
        "https://u:p@evil",
        "https://evil/path",
        "https://evil?q",
        "ftp://evil",
        "evil",
        "",
        "https://[evil",
    ],
)
def test_an_address_from_the_map_is_used_only_if_it_is_as_safe_as_the_given_ones(url: str) -> None:
    """The token goes there, too."""
    book = Book("https://a,https://b")
    book.told(url, 1, url)
    assert [book.next(), book.next(["https://a"])] == ["https://a", "https://b"]
    assert book.next(["https://a", "https://b"]) is None


def test_a_broker_that_is_gone_is_not_tried() -> None:
    book = Book(f"{A},{B}")
    book.told(A, 1, C, state="gone")
    assert book.next([A, B]) is None


def test_one_request_tries_no_more_than_some_addresses() -> None:
    urls = [f"http://a{number}" for number in range(50)]
    assert AddressBook(",".join(urls)).next(urls[:MOST_TRIED]) is None


def test_the_map_is_read_once_and_again_after_a_failure_or_when_it_is_old() -> None:
    book = Book(f"{A},{B}")
    book.told(A, 1)
    assert not book.begin_reading()
    book.now += MAP_AGE_S
    book.told(A, 1)
    book.doubt()
    assert book.begin_reading()


def test_only_one_request_reads_the_map_at_a_time() -> None:
    book = Book(f"{A},{B}")
    assert book.begin_reading()
    assert not book.begin_reading()


def test_a_map_that_nobody_gives_is_asked_for_less_and_less_often() -> None:
    book = Book(f"{A},{B}")
    pause = FIRST_MAP_PAUSE_S
    for _ in range(10):
        assert book.begin_reading()
        assert not book.learn(503, b"")
        book.end_reading()
        book.now += pause * 0.99
        assert not book.begin_reading()
        book.now += pause * 0.02
        pause = min(2 * pause, LONGEST_MAP_PAUSE_S)


@pytest.mark.parametrize("answer", [(200, b'{"name":"","brokers":[],"shards":[]}'), (404, b"")])
def test_without_a_cluster_the_given_addresses_are_all_there_is(answer: tuple[int, bytes]) -> None:
    book = Book(f"{A},{B}")
    assert book.begin_reading()
    assert book.learn(*answer)
    book.end_reading()
    assert not book.begin_reading()
    assert (book.next(), book.next([A, B])) == (A, None)


@pytest.mark.parametrize("body", [b"", b"[]", b"<html>", b'{"shards":[{"url":1}]}'])
def test_an_answer_that_is_no_map_is_ignored(body: bytes) -> None:
    book = Book(f"{A},{B}")
    assert book.begin_reading()
    assert not book.learn(200, body)
