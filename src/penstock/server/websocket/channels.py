"""The channels of one WebSocket: its subscriptions and watches.

Invariants: no event of a channel leaves before the reply that names the channel. Each channel has
its own buffer in the engine, and nothing is taken from it while the connection has no room.
Channels that have events are served in turn, a bounded frame at a time, so that the backlog of one
does not hold up the others. Must not know the bytes of a connection.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from penstock.api.caches import WatchHandle
from penstock.api.consumers import Consumer
from penstock.api.engine import Engine
from penstock.api.messages import Settle
from penstock.api.streams import Subscription
from penstock.model.errors import (
    InvalidArgument,
    NotFound,
    PenstockError,
    PermissionDenied,
    ResourceExhausted,
)
from penstock.model.limits import MAX_SUBSCRIPTIONS
from penstock.model.principals import Principal
from penstock.model.streams import Lag, SubscribeNamed
from penstock.model.tenancy import Path
from penstock.server.access import check_path
from penstock.server.commands import (
    check_offset,
    clean_reason,
    delivery_of,
    include_of,
    lease_of,
    path_of,
    subscription_of,
    watch_of,
)
from penstock.server.http.responses import encode_json, subscribe_error, typed_error
from penstock.server.message_actions import Done
from penstock.server.websocket.answers import Ok, lag_answer, named_answer, subscribed_answer
from penstock.server.websocket.binary import encode_events
from penstock.server.websocket.channel import SUBSCRIBE, WATCH, Channel, NamedChannel, Outlet
from penstock.server.websocket.events import (
    encode_runs,
    encode_singly,
    encode_watch,
    without_gaps,
)
from penstock.server.websocket.messages import (
    CacheUnwatchMessage,
    CacheWatchMessage,
    EventAckMessage,
    EventExtendMessage,
    EventMessage,
    EventNackMessage,
    EventReleaseMessage,
    LagMessage,
    PauseMessage,
    RequestId,
    ResumeMessage,
    SubscribeMessage,
    UnsubscribeMessage,
)


class EventChannel(Channel):
    """`is_single`: every event is sent in its own frame."""

    subscription: Subscription

    def __init__(self, channels: Channels, path: Path, *, is_single: bool) -> None:
        super().__init__(channels, SUBSCRIBE, path)
        self._is_single = is_single
        self._lag: Lag | None = None

    def lagging(self, lag: Lag) -> None:
        """Keeps the alert until there is room: before, nobody could read it."""
        self._lag = lag
        self.wake()

    def take(self) -> bool:
        if self._lag is not None:
            lag, self._lag = self._lag, None
            self._outlet.send_text(encode_json(lag_answer(lag)))
        max_events = self._burst.events
        runs = self.subscription.take(max_events)
        if not runs:
            return False
        count = sum(run.end - run.start for run in runs)
        if self._outlet.is_binary:
            nbytes = 0
            for part in without_gaps(runs):
                payload = encode_events(int(self.id[1:]), part)
                self._outlet.send_binary(payload)
                nbytes += len(payload)
            self._burst.learn(count, nbytes)
        elif self._is_single:
            payloads = encode_singly(self.id, runs)
            for payload in payloads:
                self._outlet.send_text(payload)
            self._burst.learn(count, sum(map(len, payloads)))
        else:
            payloads = [encode_runs(self.id, part) for part in without_gaps(runs)]
            for payload in payloads:
                self._outlet.send_text(payload)
            self._burst.learn(count, sum(map(len, payloads)))
        return count >= max_events

    def send_end(self, error: PenstockError) -> None:
        self._outlet.send_text(encode_json(subscribe_error(error, subscription_id=self.id)))

    def close(self) -> None:
        self.subscription.close()


class WatchChannel(Channel):
    handle: WatchHandle

    def __init__(self, channels: Channels, path: Path) -> None:
        super().__init__(channels, WATCH, path)

    def take(self) -> bool:
        max_events = self._burst.events
        events = self.handle.take(max_events)
        if not events:
            return False
        nbytes = 0
        for payload in encode_watch(self.id, events):
            self._outlet.send_text(payload)
            nbytes += len(payload)
        self._burst.learn(len(events), nbytes)
        return len(events) >= max_events

    def send_end(self, error: PenstockError) -> None:
        self._outlet.send_text(encode_json(typed_error(error, watch_id=self.id)))

    def close(self) -> None:
        self.handle.close()


class Channels:
    """`_opening` counts those that the engine has not answered yet."""

    def __init__(self, engine: Engine, outlet: Outlet, principal: Principal | None = None) -> None:
        self._engine = engine
        self._principal = principal
        self.outlet = outlet
        self._channels: dict[str, Channel] = {}
        self._opening = 0
        self._ready: deque[Channel] = deque()
        self._is_closed = False

    # -- messages ------------------------------------------------------------------------------

    def actions(self) -> dict[type[Any], Callable[[Any, Done], None]]:
        """Returns the messages that need an open connection, with what performs each."""
        return {
            SubscribeMessage: self.subscribe,
            UnsubscribeMessage: self.unsubscribe,
            LagMessage: self.lag,
            EventAckMessage: self.ack,
            EventNackMessage: self.nack,
            EventReleaseMessage: self.release,
            EventExtendMessage: self.extend,
            PauseMessage: self.pause,
            ResumeMessage: self.resume,
            CacheWatchMessage: self.watch,
            CacheUnwatchMessage: self.unwatch,
        }

    def subscribe(self, message: SubscribeMessage, done: Done) -> None:
        path = path_of(message.tenant_id, message.namespace, message.stream, "stream")
        command = subscription_of(path, message)
        self._check_room()
        if isinstance(command, SubscribeNamed):
            self._join(command, message.request_id, done)
            return
        channel = EventChannel(self, path, is_single=message.batch is False)
        self._opening += 1
        self._engine.streams.subscribe(
            command, channel, partial(self._subscribed, channel, message.request_id, done)
        )

    def _subscribed(
        self,
        channel: EventChannel,
        request_id: RequestId,
        done: Done,
        outcome: Subscription | PenstockError,
    ) -> None:
        self._opening -= 1
        if isinstance(outcome, PenstockError):
            done(outcome)
            return
        channel.subscription = outcome
        if (refusal := self._refusal(channel)) is not None:
            outcome.close()
            done(refusal)
            return
        self._add(channel, outcome.id)
        done(subscribed_answer(outcome, request_id))

    def _join(self, command: SubscribeNamed, request_id: RequestId, done: Done) -> None:
        """Joins a named subscription."""
        channel = NamedChannel(self, command)
        self._opening += 1
        self._engine.streams.consume(
            command, channel, partial(self._joined, channel, request_id, done)
        )

    def _joined(
        self,
        channel: NamedChannel,
        request_id: RequestId,
        done: Done,
        outcome: Consumer | PenstockError,
    ) -> None:
        self._opening -= 1
        if isinstance(outcome, PenstockError):
            done(outcome)
            return
        channel.consumer = outcome
        if (refusal := self._refusal(channel)) is not None:
            outcome.close()
            done(refusal)
            return
        self._add(channel, f"n{outcome.id}")
        done(named_answer(channel.id, channel.command, outcome, request_id))

    def ack(self, message: EventAckMessage, done: Done) -> None:
        settle = self._delivery(message)
        self._engine.ack(settle, partial(_settled, done, message.request_id))

    def release(self, message: EventReleaseMessage, done: Done) -> None:
        settle = self._delivery(message)
        self._engine.release(settle, partial(_settled, done, message.request_id))

    def nack(self, message: EventNackMessage, done: Done) -> None:
        settle = self._delivery(message)
        self._engine.nack(
            settle,
            clean_reason(message.reason),
            partial(_settled, done, message.request_id),
            delay_ms=message.delay_ms,
        )

    def extend(self, message: EventExtendMessage, done: Done) -> None:
        settle = self._delivery(message)
        lease_ms = lease_of(message.lease_ms, self._engine.limits.lease_ms)
        self._engine.extend(settle, lease_ms, partial(_settled, done, message.request_id))

    def _delivery(self, message: EventMessage) -> Settle:
        if message.subscription_id:
            check_offset(message.offset)
        channel = self._find(message.subscription_id, "subscription_id")
        if not isinstance(channel, NamedChannel):
            raise InvalidArgument("only events of a named subscription are acked")
        command = channel.command
        return delivery_of(
            self._engine,
            command.path,
            command.name,
            command.owner,
            message.offset,
            message.delivery_id,
        )

    def watch(self, message: CacheWatchMessage, done: Done) -> None:
        path = path_of(message.tenant_id, message.namespace, message.cache, "cache")
        include = include_of(message.include)
        command = watch_of(path, message.key, message.prefix, include, message.since_version)
        self._check_room()
        channel = WatchChannel(self, path)
        self._opening += 1
        self._engine.caches.watch(
            command, channel, partial(self._watched, channel, message.request_id, done)
        )

    def _watched(
        self,
        channel: WatchChannel,
        request_id: RequestId,
        done: Done,
        outcome: WatchHandle | PenstockError,
    ) -> None:
        self._opening -= 1
        if isinstance(outcome, PenstockError):
            done(outcome)
            return
        channel.handle = outcome
        if (refusal := self._refusal(channel)) is not None:
            outcome.close()
            done(refusal)
            return
        self._add(channel, outcome.id)
        done(Ok(outcome.version, watch_id=outcome.id, request_id=request_id))

    def unsubscribe(self, message: UnsubscribeMessage, done: Done) -> None:
        channel = self._subscription(message.subscription_id)
        self._close(channel)
        if isinstance(channel, NamedChannel):
            self._give_back(channel)
        done(Ok(request_id=message.request_id))

    def _give_back(self, channel: NamedChannel) -> None:
        """Releases the deliveries that had not left, so that nobody waits for their leases."""
        path, name, owner = channel.path, channel.command.name, channel.command.owner
        left = [
            delivery_of(self._engine, path, name, owner, each.offset, each.delivery_id)
            for each in channel.take_all()
        ]
        if left:
            self._engine.release_many(left, lambda _: None)

    def pause(self, message: PauseMessage, done: Done) -> None:
        self._subscription(message.subscription_id).pause()
        done(Ok(request_id=message.request_id))

    def resume(self, message: ResumeMessage, done: Done) -> None:
        self._subscription(message.subscription_id).resume()
        done(Ok(request_id=message.request_id))

    def unwatch(self, message: CacheUnwatchMessage, done: Done) -> None:
        channel = self._find(message.watch_id, "watch_id")
        if not isinstance(channel, WatchChannel):
            raise NotFound(f"no watch {channel.id!r} on this connection")
        self._close(channel)
        done(Ok(request_id=message.request_id))

    def lag(self, message: LagMessage, done: Done) -> None:
        channel = self._subscription(message.subscription_id)
        if not isinstance(channel, EventChannel):
            raise NotFound(f"a named subscription has no lag of its own: {channel.id!r}")
        done(lag_answer(channel.subscription.lag(), message.request_id))

    # -- events --------------------------------------------------------------------------------

    def open(self, channel_id: str) -> None:
        """Opens a channel whose reply has left, unless it was closed meanwhile."""
        channel = self._channels.get(channel_id)
        if channel is not None:
            channel.open()

    def schedule(self, channel: Channel) -> None:
        if not channel.is_ready:
            channel.is_ready = True
            self._ready.append(channel)
        self.outlet.schedule_turn()

    def take(self) -> None:
        """Serves the channels that have events, in turn, while there is room."""
        ready, outlet = self._ready, self.outlet
        while ready and outlet.has_room():
            channel = ready.popleft()
            channel.is_ready = False
            if channel.id in self._channels and not channel.is_paused and channel.take():
                self.schedule(channel)

    def __len__(self) -> int:
        return len(self._channels) + self._opening

    def is_waiting(self) -> bool:
        return bool(self._ready)

    def recheck(self) -> None:
        """Ends the channels that the principal may no longer have. Called after each change of the
        access rules."""
        for channel in list(self._channels.values()):
            refusal = self._refusal(channel)
            if refusal is not None:
                channel.close()
                channel.ended(refusal)

    def _refusal(self, channel: Channel) -> PenstockError | None:
        needs = channel.needs
        try:
            check_path(
                self._engine.access, self._principal, needs.permission, needs.kind, channel.path
            )
        except PermissionDenied as error:
            return error
        return None

    def drop(self, channel: Channel) -> None:
        """Forgets a channel that the engine has ended."""
        self._channels.pop(channel.id, None)

    def close(self) -> None:
        self._is_closed = True
        channels, self._channels = self._channels, {}
        self._ready.clear()
        for channel in channels.values():
            channel.close()

    def _add(self, channel: EventChannel | WatchChannel | NamedChannel, channel_id: str) -> None:
        if self._is_closed:
            # The connection was lost before the engine had answered.
            channel.close()
            return
        channel.id = channel_id
        self._channels[channel_id] = channel

    def _close(self, channel: Channel) -> None:
        del self._channels[channel.id]
        channel.close()

    def _check_room(self) -> None:
        if len(self) >= MAX_SUBSCRIPTIONS:
            raise ResourceExhausted(
                f"the connection has {MAX_SUBSCRIPTIONS} subscriptions and watches; end some, or "
                "open another connection",
                limit="subscriptions",
            )

    def _subscription(self, channel_id: str | None) -> Channel:
        channel = self._find(channel_id, "subscription_id")
        if isinstance(channel, WatchChannel):
            raise NotFound(f"no subscription {channel.id!r} on this connection")
        return channel

    def _find(self, channel_id: str | None, name: str) -> Channel:
        if not channel_id:
            raise InvalidArgument(f"{name} is required")
        channel = self._channels.get(channel_id)
        if channel is None:
            raise NotFound(f"no {name} {channel_id[:40]!r} on this connection")
        return channel


def _settled(done: Done, request_id: RequestId, outcome: PenstockError | None) -> None:
    done(Ok(request_id=request_id) if outcome is None else outcome)
