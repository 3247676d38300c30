"""Loads a file with a user's pipelines, and orders them so that those that feed others come first.

Invariant: the pipelines of a file do not feed each other in a circle, in which rows would go round
for ever. The file is run once, in this process; its functions are pickled for the executors.
"""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from pyspark import SparkContext, cloudpickle

from penstock.model.errors import FailedPrecondition, InvalidArgument, NotFound
from penstock.spark.pipelines.user import UserPipeline
from penstock.spark.running.failure import describe_error


class NeedsSpark(FailedPrecondition):
    """The file needs a session while it is loaded: start one, and load it then."""


def load(path: str) -> list[UserPipeline]:
    """Returns the file's pipelines, those that feed others first."""
    module = _module(Path(path))
    found = [each for each in vars(module).values() if isinstance(each, UserPipeline)]
    named: dict[str, UserPipeline] = {}
    for each in found:
        if named.setdefault(each.name, each) is not each:
            raise InvalidArgument(f"{path} has two pipelines called {each.name}")
    if not named:
        raise InvalidArgument(
            f"{path} has no pipeline: no function has @pipeline(source=…, sink=…)"
        )
    return in_order(list(named.values()))


def choose(path: str, name: str) -> list[UserPipeline]:
    """Returns all pipelines that have a sink, or the one of that name."""
    found = load(path)
    if not name:
        return [each for each in found if each.sink is not None]
    chosen = [each for each in found if each.name == name]
    if not chosen:
        names = ", ".join(each.name for each in found)
        raise NotFound(f"{path} has no pipeline {name}; it has {names}")
    return chosen


def in_order(pipelines: Sequence[UserPipeline]) -> list[UserPipeline]:
    """Orders the pipelines so that each comes after those that feed it."""
    placed: list[UserPipeline] = []
    on_the_way: list[UserPipeline] = []

    def place(each: UserPipeline) -> None:
        if each in placed:
            return
        if each in on_the_way:
            circle = [one.name for one in on_the_way[on_the_way.index(each) :]]
            raise InvalidArgument(f"pipelines feed each other in a circle: {_circle(circle)}")
        on_the_way.append(each)
        for other in pipelines:
            if feeds(other, each):
                place(other)
        on_the_way.pop()
        placed.append(each)

    for each in pipelines:
        place(each)
    return placed


def feeds(one: UserPipeline, other: UserPipeline) -> bool:
    """Returns whether rows that `one` writes reach `other`."""
    if one in other.sources.values():
        return True
    sink = one.sink
    return sink is not None and any(each.is_fed_by(sink) for each in other.endpoints())


def _circle(names: list[str]) -> str:
    return " → ".join([*reversed([*names, names[0]])]) if len(names) > 1 else f"{names[0]} → itself"


def _module(path: Path) -> ModuleType:
    if not path.is_file():
        raise NotFound(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(f"penstock_pipelines_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise InvalidArgument(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # so that modules beside the file can be imported
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except InvalidArgument as error:
        raise InvalidArgument(f"{path}: {error.message}") from error
    except Exception as error:
        if SparkContext._active_spark_context is None and _is_raised_by_spark(error):
            raise NeedsSpark(f"{path} can only be loaded while Spark runs") from error
        raise InvalidArgument(f"{path} cannot be loaded: {describe_error(error)}") from error
    # Executors do not have this module, so its functions are sent as a whole.
    cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
    return module


def _is_raised_by_spark(error: BaseException) -> bool:
    """Returns whether PySpark raised it. Many of its functions need a session, `udf` among them."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and "/pyspark/" in frames[-1].filename
