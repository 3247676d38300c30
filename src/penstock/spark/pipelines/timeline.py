"""Draws the timeline of a run: a lane for each step, with what its messages went through.

Invariant: ids are shown as they are, never interpreted as markup. A picture has a bounded size
however many steps the run has, and says how many it leaves out. No state outlives a call, so
several threads may draw. Must not know Spark.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from io import BytesIO
from itertools import pairwise
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont
from matplotlib.ft2font import FT2Font
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from penstock.model.journal import ACKED, DEAD_LETTERED
from penstock.spark.pipelines.lineage_tables import RUNNING, WAITING, scoped

Row = Mapping[str, Any]

MAX_LANES = 60
MAX_LABEL = 34
MAX_LINES_IN_LANE = 5

_INCHES_PER_LANE = 0.3
_WIDTH_INCHES = 12.0
_DPI = 110
_EDGE = "#333333"
_COLOURS = {
    "waiting": "#d9dee5",
    "running": "#3b7dd8",
    "failed": "#d64545",
    "back-off": "#f6d7d7",
    "still running": "#9cc1f0",
}
_PATH = "#e08a00"
_UNITS = ((3 * 3600_000, 3600_000, "hours"), (180_000, 60_000, "minutes"), (2000, 1000, "seconds"))


@dataclass(frozen=True)
class Bar:
    """A span of time in a lane. `line` is the number of the message among those of its step."""

    line: int
    start: datetime
    end: datetime
    what: str


def chosen(steps: Sequence[Row], most: int = MAX_LANES) -> list[Row]:
    """Returns the steps in order of time. If there are too many, it keeps dead-lettered ones first,
    then the critical path, then failed ones, and of each those that took longest."""
    ranked = sorted(
        steps,
        key=lambda step: (
            step["outcome"] != DEAD_LETTERED,
            step["path_position"] is None,
            not step["failures"],
            -sum(step[name] for name in ("waiting_ms", "running_ms", "retry_ms")),
        ),
    )
    return sorted(ranked[:most], key=lambda step: (_begins(step), step["path_position"] or 0))


def bars(tries: Sequence[Row], until: datetime) -> list[Bar]:
    """Returns the bars of a step's attempts. One that has not ended lasts `until`."""
    by_message: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for one in sorted(tries, key=lambda row: row["position"]):
        by_message[one["partition"], one["offset"]].append(one)
    found: list[Bar] = []
    for line, rows in enumerate(by_message.values()):
        previous: datetime | None = None
        for one in rows:
            begins = one["delivered_at"]
            if begins is None:
                continue
            waits_from = previous or one["produced_at"]
            if waits_from is not None and waits_from < begins:
                what = "waiting" if previous is None else "back-off"
                found.append(Bar(line, waits_from, begins, what))
            previous = one["ended_at"]
            found.append(Bar(line, begins, max(begins, previous or until), _kind(one)))
        last = rows[-1]
        if last["retry_at"] is not None and previous is not None and last["outcome"] != ACKED:
            ends = min(max(previous, last["retry_at"]), until)
            found.append(Bar(line, previous, max(previous, ends), "back-off"))
    return found


def draw(run_id: str, steps: Sequence[Row], attempts: Sequence[Row], left_out: int = 0) -> bytes:
    """Returns a PNG. `left_out` counts steps of the run that are not in `steps`."""
    lanes = chosen(steps)
    left_out += len(steps) - len(lanes)
    start = min((_begins(step) for step in lanes), default=datetime.fromtimestamp(0, UTC))
    until = max((_ends(step) for step in lanes), default=start)
    height = 1.9 + _INCHES_PER_LANE * max(2, len(lanes))
    figure = Figure(figsize=(_WIDTH_INCHES, height), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes: Axes = figure.subplots()
    scale, unit = _scale(start, until)
    picture = _Picture(axes, start, until, scale)
    tries: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for one in attempts:
        tries[_lane_key(one)].append(one)
    for lane, step in enumerate(lanes):
        picture.lane(lane, step, tries[_lane_key(step)])
    picture.path([(lane, step) for lane, step in enumerate(lanes)])
    _frame(axes, lanes, f"{unit} since {start.astimezone(UTC):%Y-%m-%d %H:%M:%S.%f}"[:-3] + " UTC")
    title = _title(run_id, steps, start, until, left_out)
    figure.suptitle(title, x=0.01, ha="left", parse_math=False, fontsize=11)
    figure.legend(handles=_legend(), loc="outside lower center", ncols=8, fontsize=8, frameon=False)
    written = BytesIO()
    figure.savefig(written, format="png")
    return written.getvalue()


class _Picture:
    """Lanes from top to bottom, on an axis of time that begins with the run."""

    def __init__(self, axes: Axes, start: datetime, until: datetime, scale: float) -> None:
        self._axes = axes
        self._start = start
        # A run of no duration still has a picture.
        self._until = until
        self._scale = scale
        self._span = max(self._at(until), 1.0 / scale)
        axes.set_xlim(-0.01 * self._span, 1.03 * self._span)

    def lane(self, lane: int, step: Row, tries: Sequence[Row]) -> None:
        found = bars(tries, self._until)
        if not found:
            begins = _begins(step)
            found = [Bar(0, begins, max(begins, _ends(step, self._until)), "waiting")]
        lines = min(MAX_LINES_IN_LANE, 1 + max(bar.line for bar in found))
        height = 0.7 / lines
        on_path = step["path_position"] is not None
        for bar in found:
            self._axes.barh(
                lane - 0.35 + height * (bar.line % lines + 0.5),
                # Bars of less than a pixel stay visible.
                max(self._at(bar.end) - self._at(bar.start), 0.002 * self._span),
                height * 0.92,
                left=self._at(bar.start),
                color=_COLOURS[bar.what],
                hatch="////" if bar.what == "back-off" else None,
                edgecolor=_COLOURS["failed"] if bar.what == "back-off" else "none",
                linewidth=0,
                zorder=2,
            )
        if on_path:
            self._outline(lane, found)
        if step["outcome"] == DEAD_LETTERED:
            self._mark(lane, max(bar.end for bar in found), "X", _COLOURS["failed"])
        elif step["outcome"] in (RUNNING, WAITING):
            self._mark(lane, max(bar.end for bar in found), ">", _EDGE)

    def path(self, lanes: Sequence[tuple[int, Row]]) -> None:
        """Draws a line from the end of each step of the critical path to the next step."""
        on_path = sorted(
            (item for item in lanes if item[1]["path_position"] is not None),
            key=lambda item: item[1]["path_position"],
        )
        for (lane, step), (next_lane, following) in pairwise(on_path):
            if following["path_position"] != step["path_position"] + 1:
                continue  # a step between them is left out
            ends = self._at(step["last_message"]["ended_at"])
            begins = self._at(following["last_message"]["produced_at"])
            self._axes.plot(
                [ends, ends, begins, begins],
                [lane, (lane + next_lane) / 2, (lane + next_lane) / 2, next_lane],
                color=_PATH, linewidth=1.2, linestyle=(0, (3, 1.5)), zorder=3,
            )  # fmt: skip

    def _outline(self, lane: int, found: Sequence[Bar]) -> None:
        begins = self._at(min(bar.start for bar in found))
        ends = max(self._at(max(bar.end for bar in found)), begins + 0.002 * self._span)
        self._axes.barh(
            lane, ends - begins, 0.82, left=begins, color="none", edgecolor=_PATH, linewidth=1.6,
            zorder=4,
        )  # fmt: skip

    def _mark(self, lane: int, moment: datetime, marker: str, colour: str) -> None:
        self._axes.plot(
            self._at(moment), lane, marker=marker, color=colour, markersize=8, zorder=5,
            markeredgecolor="white", clip_on=False,
        )  # fmt: skip

    def _at(self, moment: datetime) -> float:
        return (moment - self._start).total_seconds() * 1000 / self._scale


def _frame(axes: Axes, lanes: Sequence[Row], time_label: str) -> None:
    axes.set_ylim(max(2, len(lanes)) - 0.4, -0.6)
    axes.set_yticks(range(len(lanes)))
    axes.set_yticklabels([_label(step) for step in lanes], parse_math=False, fontsize=8)
    for tick, step in zip(axes.get_yticklabels(), lanes, strict=True):
        if step["path_position"] is not None:
            tick.set_fontweight("bold")
    axes.set_xlabel(time_label, fontsize=9)
    axes.tick_params(axis="x", labelsize=8)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#e5e5e5", linewidth=0.7, zorder=0)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _legend() -> list[Patch | Line2D]:
    patches: list[Patch | Line2D] = [
        Patch(
            facecolor=colour,
            hatch="////" if name == "back-off" else None,
            edgecolor=_COLOURS["failed"] if name == "back-off" else "none",
            linewidth=0,
            label=name,
        )
        for name, colour in _COLOURS.items()
    ]
    outline = Patch(facecolor="none", edgecolor=_PATH, linewidth=1.6, label="critical path")
    dead = Line2D([], [], marker="X", color=_COLOURS["failed"], linestyle="", label="dead-lettered")
    goes_on = Line2D([], [], marker=">", color=_EDGE, linestyle="", label="not finished")
    return [*patches, outline, dead, goes_on]


def _kind(one: Row) -> str:
    if one["outcome"] == RUNNING:
        return "still running"
    return "running" if one["outcome"] == ACKED else "failed"


def _lane_key(row: Row) -> tuple[Any, ...]:
    return row["step_id"], row["tenant"], row["namespace"], row["topic"], row["group"]


def _begins(step: Row) -> datetime:
    moment: datetime = (
        step["produced_at"] or step["delivered_at"] or step["last_message"]["ended_at"]
    )
    return moment


def _ends(step: Row, until: datetime | None = None) -> datetime:
    moment: datetime = step["finished_at"] or until or step["last_message"]["ended_at"]
    return moment


def _scale(start: datetime, until: datetime) -> tuple[float, str]:
    length = (until - start).total_seconds() * 1000
    for least, scale, unit in _UNITS:
        if length >= least:
            return scale, unit
    return 1, "milliseconds"


def _title(
    run_id: str, steps: Sequence[Row], start: datetime, until: datetime, left_out: int
) -> str:
    length = (until - start).total_seconds()
    dead = sum(step["dead_letters"] for step in steps)
    is_open = any(step["outcome"] in (RUNNING, WAITING) for step in steps)
    outcome = "running" if is_open else "failed" if dead else "succeeded"
    count = max(len(steps), left_out + min(len(steps), MAX_LANES))
    parts = [
        _plain(run_id, 60),
        outcome,
        f"{length:,.3f} s",
        f"{count:,} step{'' if count == 1 else 's'}",
    ]
    if dead:
        parts.append(f"{dead} dead-lettered")
    if left_out:
        parts.append(f"{left_out:,} steps are left out here")
    return "  ·  ".join(parts)


def _label(step: Row) -> str:
    name = _plain(step["step_id"] or "(no step)", MAX_LABEL)
    where = _plain(f"{scoped(step, 'topic')} / {step['group'] or '(no group)'}", MAX_LABEL)
    return f"{name}  –  {where}"


def _plain(text: str, most: int) -> str:
    """Puts a text on one line and shortens it, with □ for characters that the font lacks."""
    known = _shapes()
    shown = "".join(sign if ord(sign) in known else "□" for sign in text)
    if len(shown) <= most:
        return shown
    # Long names often differ at their ends.
    return f"{shown[: most // 2]}…{shown[len(shown) - (most - most // 2 - 1) :]}"


@lru_cache(maxsize=1)
def _shapes() -> frozenset[int]:
    return frozenset(FT2Font(findfont(FontProperties())).get_charmap())
