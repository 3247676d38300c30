"""Random HTTP requests: ordinary ones, odd ones that some reader takes for something else, and
damaged ones; and the reads in which they arrive.

Everything comes from the `Random` that is given, so a seed repeats a run.
"""

from __future__ import annotations

from itertools import pairwise
from random import Random

SMUGGLED = b"DELETE /v1/topics/victim HTTP/1.1\r\nHost: localhost\r\n\r\n"
PRODUCE = b'{"topic":"t","value":"v"}'

BODIES = [
    b"",
    PRODUCE,
    b'{"topic":"t","key":"k","value":"another"}',
    b'{"topic":"nowhere","value":"v"}',
    SMUGGLED,
    PRODUCE + b"\r\n\r\n" + SMUGGLED,
    b"\r\n\r\n" + SMUGGLED,
    b"0\r\n\r\n" + SMUGGLED,
    b"not JSON",
]

LENGTHS = [
    b"%d", b"%d", b"%d", b"%d", b"%d ", b"%d ", b"%d  ", b" %d", b"%d\t", b"\t%d", b"0%d", b"00%d",
    b"00000000000000000000%d",
    b"+%d", b"-%d", b"%d,%d", b"%d, %d", b"%d;", b"0x%x", b"%d.0", b"%de0", b"%d\x0b", b"%d\x0c",
    b"%d\x00", b"%d\r", b"%d\n", b"%d_0", b"\xa0%d", b"%d\xa0", b"'%d'", b"", b" ", b"0", b"1",
    b"99999999999", b"18446744073709551615", b"18446744073709551616", b"9999999999999999999999",
]  # fmt: skip

CODINGS = [
    b"chunked", b"Chunked", b"chunked ", b"\tchunked", b"identity", b"gzip, chunked", b"xchunked",
    b"chunked, chunked", b"chunked, identity", b"", b"chunked\x0b", b"chunked;q=1", b"\"chunked\"",
]  # fmt: skip

LENGTH_NAMES = [
    b"Content-Length", b"content-length", b"CONTENT-LENGTH", b"Content-Length ", b" Content-Length",
    b"Content_Length", b"Content-Length\t", b"Content-Length\x00", b"Content-Lengt\xc3\xa9",
    b"X\r\nContent-Length", b"X: y\nContent-Length", b"X: y\rContent-Length",
    b"Content\r\n -Length",
]  # fmt: skip

EXTRAS = [
    b"X-A: b", b"X-A:b", b"X-A: ", b"X-A:", b"X-A: b\r\n c", b"X-A: b\n", b"X-A: \x01",
    b"X-Request-Id: mine", b"Accept: text/event-stream", b"Accept: */*", b"Expect: 100-continue",
    b"Expect: 200", b"Connection: close", b"Connection: keep-alive", b"Connection: Close, x",
    b"Connection: upgrade\r\nUpgrade: h2c", b"Connection: upgrade\r\nUpgrade: websocket",
    b"Proxy-Connection: close", b"Origin: http://localhost", b"Origin: http://[",
    b"Origin: https://elsewhere.example", b"Origin: null", b"Sec-Fetch-Site: cross-site",
    b"Authorization: Bearer x", b"Host: localhost", b"Host: elsewhere.example", b"no colon",
    b": no name", b"Transfer-Encoding: chunked", b"Content-Length: 0", b"Content-Length: 3",
    b"X-Penstock-Tenant: acme", b"X-Penstock-Tenant: default", b"X-Penstock-Namespace: prod",
    b"X-Penstock-Tenant: ", b"X-Penstock-Namespace: \xff", b"x-penstock-tenant: k\xc3\xa4se",
    b"Keep-Alive: timeout=5", b"Trailer: X", b"TE: trailers", b"Content-Type: text/plain",
]  # fmt: skip

TARGETS = [
    (b"POST", b"/v1/produce"), (b"POST", b"/v1/produce"), (b"POST", b"/v1/produce"),
    (b"GET", b"/v1/healthz"), (b"GET", b"/v1/topics"), (b"HEAD", b"/v1/topics"),
    (b"GET", b"/v1/topics?"), (b"GET", b"/v1/topics?a=b"), (b"POST", b"/v1/topics"),
    (b"GET", b"http://localhost/v1/topics"), (b"GET", b"http://[/v1/topics"), (b"GET", b"*"),
    (b"DELETE", b"/v1/topics/none"), (b"PUT", b"/v1/produce"), (b"GET", b"/docs/asyncapi.json"),
    (b"GET", b"/v1/nothing"), (b"GET", b"/nothing"), (b"POST", b"/v1/ack"), (b"get", b"/v1/topics"),
    (b"CONNECT", b"localhost:80"), (b"OPTIONS", b"*"), (b"PRI", b"*"), (b"GET", b"/v1/felix/ws"),
    (b"POST", b"/v1/produce/batch"), (b"GET", b"/v1/top%69cs"), (b"GET", b"/v1/topics#x"),
]  # fmt: skip

VERSIONS = [
    b" HTTP/1.1", b" HTTP/1.1", b" HTTP/1.1", b" HTTP/1.1", b" HTTP/1.1", b" HTTP/1.0",
    b" HTTP/1.0", b"", b" HTTP/0.9", b" HTTP/2.0", b" HTTP/1.2", b" http/1.1", b"  HTTP/1.1",
    b" HTTP/1.1 ", b" HTTP/11", b" HTTP/1.1\r", b" HTTP/1",
]  # fmt: skip


def request(random: Random) -> bytes:
    """One request; about a third of them are what a decent client sends."""
    is_decent = random.random() < 0.35
    method, target = random.choice(TARGETS[:6] if is_decent else TARGETS)
    version = b" HTTP/1.1" if is_decent else random.choice(VERSIONS)
    body = random.choice(BODIES) if method == b"POST" or random.random() < 0.2 else b""
    lines = [method + b" " + target + version]
    if is_decent or random.random() < 0.9:
        lines.append(random.choice([b"Host: localhost", b"host: localhost", b"Host: 127.0.0.1:1"]))
    framing, body = _framed(random, body, is_decent=is_decent)
    lines += framing
    if not is_decent:
        for _ in range(random.choice([0, 0, 1, 1, 2])):
            lines.insert(random.randrange(1, len(lines) + 1), random.choice(EXTRAS))
    end = random.choice([b"\n", b"\r", b"\r\r\n"]) if random.random() < 0.03 else b"\r\n"
    return end.join([*lines, b"", b""]) + body


def _framed(random: Random, body: bytes, *, is_decent: bool) -> tuple[list[bytes], bytes]:
    """The headers that say where the body ends, truly or not, and the body as it is sent."""
    if is_decent or random.random() < 0.15:
        return ([b"Content-Length: %d" % len(body)] if body else []), body
    if random.random() < 0.25:
        chunked = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if body else b"0\r\n\r\n"
        return [b"Transfer-Encoding: " + random.choice(CODINGS)], chunked
    form = random.choice(LENGTHS)
    name = random.choice(LENGTH_NAMES) if random.random() < 0.3 else b"Content-Length"
    length = max(0, len(body) + random.choice([0, 0, 0, 0, 0, 0, -1, 1, 3]))
    return [name + b": " + form % ((length,) * form.count(b"%"))], body


def damaged(random: Random, data: bytes) -> bytes:
    """Some bytes changed, left out, doubled or put in; mostly in the head."""
    mutant = bytearray(data)
    for _ in range(random.choice([1, 1, 1, 2, 4])):
        if not mutant:
            break
        at = random.randrange(min(len(mutant), 120))
        way = random.randrange(4)
        if way == 0:
            mutant[at] = random.choice(b"\x00\t\n\r :,;/?0159aZ\x7f\x80\xff")
        elif way == 1:
            del mutant[at : at + random.choice([1, 1, 2, 8])]
        elif way == 2:
            mutant[at:at] = mutant[at : at + random.choice([1, 2, 16])]
        else:
            mutant[at:at] = random.choice(
                [b"\r\n", b" ", b"\t", b"\r", b"\n", b"\x00", b"\r\n\r\n"]
            )
    return bytes(mutant)


def relative(random: Random, data: bytes) -> bytes:
    """Nearly the same request: what was learned of one must not be used for the other."""
    head, mark, body = data.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    way = random.randrange(5)
    if way == 0:
        lines[0] = lines[0].replace(b"HTTP/1.1", b"HTTP/1.0")
    elif way == 1:
        lines[0] = lines[0].replace(b"HTTP/1.0", b"HTTP/1.1")
    elif way == 2:
        lines = [lines[0], *[line for line in lines[1:] if random.random() < 0.6]]
    elif way == 3:
        lines.append(random.choice(EXTRAS))
    else:
        at = random.randrange(len(lines))
        lines[at] += random.choice([b" ", b"\t", b"  ", b"\x0b", b",", b"\r"])
    return b"\r\n".join(lines) + mark + body


def conversation(random: Random) -> list[bytes]:
    """The reads of one connection: requests of a few kinds, each several times, whole or cut, one
    by one or run together."""
    kinds = [request(random) for _ in range(random.choice([1, 1, 2, 3]))]
    if random.random() < 0.4:
        kinds.append(relative(random, random.choice(kinds)))
    if random.random() < 0.25:
        kinds.append(damaged(random, random.choice(kinds)))
    sent = [random.choice(kinds) for _ in range(random.choice([2, 3, 4, 6]))]
    reads: list[bytes] = []
    for data in sent:
        pieces = cut(random, data) if data and random.random() < 0.25 else [data]
        if reads and random.random() < 0.3:
            reads[-1] += pieces.pop(0)
        reads += pieces
    return reads


def cut(random: Random, data: bytes) -> list[bytes]:
    """The data in two or more pieces."""
    places = sorted({random.randrange(len(data)) for _ in range(random.choice([1, 1, 2, 5]))})
    bounds = [0, *places, len(data)]
    pieces = [data[start:end] for start, end in pairwise(bounds)]
    return [piece for piece in pieces if piece]
