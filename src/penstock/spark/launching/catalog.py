"""The catalog of pipelines: the built-in ones by name, and those of a user's file.

Invariant: a name means one pipeline. A pipeline's module is imported when it is asked for.
"""

from __future__ import annotations

import hashlib
import importlib
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.model.errors import InvalidArgument, NotFound
from penstock.spark.pipelines.names import BUILT_IN
from penstock.spark.running.pipeline import Pipeline


@dataclass(frozen=True)
class Chosen:
    """A pipeline and its settings in a run."""

    pipeline: Pipeline
    settings: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.pipeline.name

    @property
    def digest(self) -> str:
        """A hash that is the same for the same settings."""
        return hashlib.sha256(repr(sorted(self.settings.items())).encode()).hexdigest()


def built_in(name: str) -> Pipeline:
    found = importlib.import_module(f"penstock.spark.pipelines.{name}").PIPELINE
    if not isinstance(found, Pipeline):
        raise TypeError(f"{name}.PIPELINE is not a Pipeline")
    return found


def built_ins() -> list[Pipeline]:
    return [built_in(name) for name in BUILT_IN]


def find(words: Sequence[str]) -> list[Pipeline]:
    """Returns the pipelines that the words name: a built-in one, all of a file in the order in
    which they feed each other, or one of a file as `file.py:name`."""
    found: list[Pipeline] = []
    for word in words:
        found += _meant(word)
    names = [pipeline.name for pipeline in found]
    for name in names:
        if names.count(name) > 1:
            raise InvalidArgument(
                f"pipeline {name} is named twice, and --set would apply to both: run it with other "
                "options in a second command, with its own --name"
            )
    return found


def choose(words: Sequence[str], given: Iterable[tuple[str, str]]) -> list[Chosen]:
    """Returns the pipelines with their settings. An option is given as `name` to every pipeline
    that has it, or as `pipeline.name` to one."""
    try:
        return _chosen(find(words), given)
    except SystemExit as error:
        # A user's file is run to find its pipelines.
        where = traceback.extract_tb(error.__traceback__)[-1]
        raise InvalidArgument(
            f"{where.filename}, line {where.lineno}, calls sys.exit when it is loaded"
        ) from error


def _chosen(pipelines: Sequence[Pipeline], given: Iterable[tuple[str, str]]) -> list[Chosen]:
    settings: dict[str, dict[str, str]] = {pipeline.name: {} for pipeline in pipelines}
    for option, value in given:
        for pipeline in _concerned(pipelines, option):
            settings[pipeline.name][option.removeprefix(f"{pipeline.name}.")] = value
    return [Chosen(pipeline, pipeline.settings(settings[pipeline.name])) for pipeline in pipelines]


def _meant(word: str) -> list[Pipeline]:
    if word in BUILT_IN:
        return [built_in(word)]
    path, colon, name = word.rpartition(":")
    if not (colon and path.endswith(".py")):
        path, name = word, ""
    if path.endswith(".py"):
        from penstock.spark.pipelines import user_file

        try:
            return [each.as_pipeline() for each in user_file.choose(path, name)]
        except NotFound as error:
            raise InvalidArgument(error.message) from error
    raise InvalidArgument(
        f"there is no pipeline {word!r}; there are {', '.join(BUILT_IN)}, and files that end in .py"
    )


def _concerned(pipelines: Sequence[Pipeline], option: str) -> list[Pipeline]:
    for pipeline in pipelines:
        if option.startswith(f"{pipeline.name}."):
            return [pipeline]
    concerned = [
        pipeline
        for pipeline in pipelines
        if any(option == known.name for known in pipeline.options)
    ]
    if concerned:
        return concerned
    if len(pipelines) == 1:
        return list(pipelines)  # it raises, with the options that it has
    names = ", ".join(pipeline.name for pipeline in pipelines)
    raise InvalidArgument(
        f"none of {names} has an option {option}; `penstock pipeline list --options` shows them"
    )
