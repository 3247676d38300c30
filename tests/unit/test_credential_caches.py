"""The caches of heads and verdicts, with credentials that expire and change.

Random sequences of requests, passing time, revocations, rotations, new static tokens and new keys,
against a broker without caches and against a model of which credential is valid.
"""

from __future__ import annotations

import asyncio
import re
from random import Random
from typing import Any

import pytest

from penstock.engine.embedded import EmbeddedEngine
from penstock.model.access import AccessRule
from penstock.model.tokens import Token
from penstock.server.identity.authenticator import Authenticator
from penstock.server.identity.credentials import digest_of
from penstock.server.identity.jwt import ClaimNames, JwtVerifier
from penstock.server.identity.jwt_keys import JwtKeys, read_shared_key
from tests.jwt_tokens import AUDIENCE, ISSUER, claims, signed
from tests.unit.memory_connection import MemoryConnection

NOW_MS = 1_800_000_000_000
STATIC = ["static-one", "static-two"]
SHARED = [b"a" * 32, b"b" * 32]
OF_ITS_OWN = re.compile(rb"(x-request-id|date): [^\r]*\r\n")


class World:
    """The time, and which secrets are valid until when; the same for both brokers."""

    def __init__(self) -> None:
        self.now_ms = NOW_MS
        self.static = 0
        self.key = 0
        self.last = ""
        self.expires: dict[str, int] = {}
        self.secrets: dict[str, dict[int, int]] = {}
        """For each token, its secrets that may be valid, and until when; 0 for no end."""

    def is_valid(self, text: str) -> bool:
        if text in STATIC:
            return STATIC.index(text) == self.static
        if text.startswith("pst_"):
            _, token_id, secret = text.split("_")
            until_ms = self.secrets.get(token_id, {}).get(int(secret), -1)
            expires_ms = self.expires.get(token_id, 0)
            return all(not end or end > self.now_ms for end in (until_ms, expires_ms))
        if text.startswith("jwt-"):
            _, key, expires_s = text.split("-")
            return int(key) == self.key and int(expires_s) * 1000 > self.now_ms
        return False


def token_text(token_id: str, secret: int) -> str:
    return f"pst_{token_id}_{secret:043d}"


class Side:
    def __init__(self, world: World, *, is_remembering: bool) -> None:
        self.world = world
        self.keys = JwtKeys("keys", is_shared=True, refresh_ms=1000)
        self.keys.keys = tuple(read_shared_key(SHARED[0]))
        self.memory = MemoryConnection(is_remembering=is_remembering, authenticate=self._make)
        self.verifier.follow_keys(self.memory.watch.changed)
        self.principals: list[str] = []
        handle = self.memory.dispatch.handle

        def noting(request: Any, reply: Any) -> None:
            assert request.notes.principal is not None
            self.principals.append(request.notes.principal.name)
            handle(request, reply)

        self.memory.dispatch.handle = noting  # type: ignore[method-assign]

    def _make(self, engine: EmbeddedEngine) -> Authenticator:
        clock = lambda: self.world.now_ms  # noqa: E731
        self.verifier = JwtVerifier(
            self.keys,
            issuer=ISSUER,
            audience=AUDIENCE,
            algorithms=("HS256",),
            leeway_ms=0,
            claims=ClaimNames(),
            now_ms=clock,
        )
        return Authenticator(engine.tokens, static_token=STATIC[0], jwt=self.verifier, now_ms=clock)

    async def ask(self, data: bytes) -> tuple[bytes, bool]:
        """Sends the bytes on the open connection, or on a new one if it was closed."""
        memory = self.memory
        if memory.transport.closed:
            memory.protocol.connection_lost(None)
            memory.connect()
        memory.transport.written = b""
        memory.protocol.data_received(data)
        await memory.rest(8)
        return OF_ITS_OWN.sub(b"", memory.transport.written), memory.transport.closed

    async def do(self, turns: int, command: Any, *arguments: Any) -> None:
        """Gives a command. Without turns, the next request comes before connections are closed."""
        command(*arguments, lambda outcome: None)
        await self.memory.rest(turns)

    def use_static(self, token: str) -> None:
        if self.memory.dispatch.admission.use_token(token):
            self.memory.watch.changed()

    def use_key(self, key: int) -> None:
        self.keys._use(read_shared_key(SHARED[key]))


def head_with(random: Random, text: str) -> bytes:
    """A request in one of a few spellings, so that heads come again."""
    if text.startswith("jwt-"):
        _, key, expires_s = text.split("-")
        body = claims(NOW_MS / 1000, exp=int(expires_s), iat=None)
        text = signed(body, "HS256", "", SHARED[int(key)]).decode()
    # A query that is new is not in the cache of heads; its headers may be in that of verdicts.
    query = f"?n={random.random()}" if random.random() < 0.4 else ""
    path = random.choice(["/v1/topics", "/v1/version"]) + query
    name = random.choice(["Authorization", "authorization"])
    credentials = f"{name}: Bearer {text}\r\n" if text else ""
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{credentials}\r\n".encode()


@pytest.mark.parametrize("seed", range(4))
def test_a_cached_verdict_ends_with_its_credential(seed: int) -> None:
    async def test() -> None:
        random, world = Random(seed), World()
        sides = Side(world, is_remembering=True), Side(world, is_remembering=False)
        hits = heads = 0
        for step in range(600):
            kind = random.random()
            if kind < 0.8:
                hits += await _request(random, world, sides)
                heads = max(heads, len(sides[0].memory.dispatch.head_cache))
            elif kind < 0.93:
                world.now_ms += random.choice([1, 400, 1_500])
                if random.random() < 0.5:
                    for side in sides:
                        side.memory.watch.sweep()
            else:
                await _change(random, world, sides, step)
        assert hits > 60
        assert heads > 3
        for side in sides:
            side.memory.engine.close()

    asyncio.run(test())


async def _request(random: Random, world: World, sides: tuple[Side, Side]) -> int:
    if random.random() < 0.6:
        world.last = random.choice(_texts(random, world))
    text = world.last
    data = head_with(random, text) * random.choice([1, 1, 2])
    for side in sides:
        side.principals = []
    cached, plain = [await side.ask(data) for side in sides]
    assert cached == plain, data
    assert sides[0].principals == sides[1].principals
    status = 200 if world.is_valid(text) else 401
    assert cached[0].startswith(b"HTTP/1.1 %d" % status), (text, cached, world.now_ms)
    return status == 200


def _texts(random: Random, world: World) -> list[str]:
    known = [token_text(each, secret) for each in world.secrets for secret in range(3)]
    expires_s = world.now_ms // 1000 + random.choice([2, 900])
    return [*STATIC, "", "nobody", f"jwt-0-{expires_s}", f"jwt-1-{expires_s}", *known * 2]


async def _change(random: Random, world: World, sides: tuple[Side, Side], step: int) -> None:
    kind, turns = random.randrange(6), random.choice([0, 8])
    if kind == 0:
        world.static ^= 1
        for side in sides:
            side.use_static(STATIC[world.static])
    elif kind == 1:
        world.key ^= 1
        for side in sides:
            side.use_key(world.key)
    elif kind == 2 and world.secrets:
        token_id = random.choice(list(world.secrets))
        del world.secrets[token_id]
        for side in sides:
            await side.do(turns, side.memory.engine.tokens.revoke, token_id)
    elif kind == 3 and world.secrets:
        await _rotate(random, world, sides, turns)
    elif len(world.secrets) < 4:
        token_id = f"{step:016x}"
        world.expires[token_id] = world.now_ms + 2_000 if random.random() < 0.5 else 0
        world.secrets[token_id] = {0: 0}
        wanted = Token(
            token_id, f"p{step}", None, None, (), False, 0, world.expires[token_id],
            digest_of(b"%043d" % 0),
        )  # fmt: skip
        for side in sides:
            await side.do(8, side.memory.engine.tokens.create, wanted)


async def _rotate(random: Random, world: World, sides: tuple[Side, Side], turns: int) -> None:
    token_id = random.choice(list(world.secrets))
    secrets = world.secrets[token_id]
    current = next(secret for secret, until_ms in secrets.items() if not until_ms)
    following = (current + 1) % 3
    until_ms = random.choice([0, world.now_ms + 1_000])
    world.secrets[token_id] = ({current: until_ms} if until_ms else {}) | {following: 0}
    digest = digest_of(b"%043d" % following)
    for side in sides:
        await side.do(turns, side.memory.engine.tokens.rotate, token_id, digest, until_ms)


def allow_all(side: Side) -> None:
    """Lets the senders consume: their names are those of the token and of the JWT."""
    for name in ("p", "jwt-0", "alice"):
        rule = AccessRule(tenant_id="default", principal=name, permissions=("writer",))
        side.memory.engine.access.grant(rule, None, lambda outcome: None)


@pytest.mark.parametrize("how", ["revoked", "rotated", "static", "key"])
def test_a_connection_closes_in_the_turn_after_its_credential_ends(how: str) -> None:
    """Without waiting for the sweep of every second; a stream and an idle connection alike."""

    async def test(is_streaming: bool) -> None:
        world = World()
        side = Side(world, is_remembering=True)
        await side.memory.topic()
        wanted = Token("0" * 16, "p", None, None, (), False, 0, 0, digest_of(b"%043d" % 0))
        await side.do(8, side.memory.engine.tokens.create, wanted)
        allow_all(side)
        texts = {"static": STATIC[0], "key": f"jwt-0-{NOW_MS // 1000 + 60}"}
        data = head_with(Random(1), texts.get(how, token_text("0" * 16, 0)))
        if is_streaming:
            target = b"/v1/consume?topic=t&group=g&owner=o "
            data = re.sub(rb"/v1/\S+ ", target, data)
        written, closed = await side.ask(data)
        assert (written.startswith(b"HTTP/1.1 200"), closed) == (True, False)
        tokens = side.memory.engine.tokens
        if how == "revoked":
            tokens.revoke(wanted.id, lambda outcome: None)
        elif how == "rotated":
            tokens.rotate(wanted.id, digest_of(b"%043d" % 1), 0, lambda outcome: None)
        elif how == "static":
            side.use_static(STATIC[1])
        else:
            side.use_key(1)
        await side.memory.rest(2)
        assert side.memory.transport.closed
        assert side.memory.protocol.stream is None
        side.memory.engine.close()

    asyncio.run(test(is_streaming=False))
    asyncio.run(test(is_streaming=True))
