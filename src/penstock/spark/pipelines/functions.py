"""A user's function, `path/file.py:name`: found, loaded, and told what kind it is.

Invariant: what is wrong with the file is said with the file and its line, before a query starts. A
function travels as the text of its file, and every process that calls it runs that text once: so
what the file makes at import, a model or a connection, need not be one that can be pickled. Must
not know what the function is for.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import linecache
import sys
import traceback
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from pyspark import cloudpickle

from penstock.model.errors import InvalidArgument

FunctionKind = Literal["row", "value", "series", "frame"]
"""Takes a row as a dict, a value as a string, a pandas Series of values, or a Spark DataFrame."""

TAKES = "path/file.py:name, a Python file and a function in it"

_OF_FILE = "penstock_function_"


@dataclass(frozen=True)
class UserFunction:
    """Reaches executors as it is, and finds or makes its module there."""

    path: str
    name: str
    kind: FunctionKind
    source: str = field(repr=False)

    def callable(self) -> Callable[[Any], Any]:
        found: Callable[[Any], Any] = getattr(_module(self.path, self.source), self.name)
        return found

    def place_of(self, error: BaseException) -> str:
        """Type, text and, if the file has to do with it, the line."""
        return _told(error, self.path)


def load(spec: str) -> UserFunction:
    path, name, source = _read(spec)
    try:
        module = _module(str(path), source)
    except (Exception, SystemExit) as error:
        raise _unloadable(spec, path, error) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise InvalidArgument(f"function {spec!r}: {_missing(module, name)}")
    return UserFunction(str(path), name, _kind(spec, function), source)


def look(spec: str) -> FunctionKind | None:
    """What the file says of the function without being run, which may take Spark, or long: raises
    if it cannot be loaded, or has no such function. The kind, where the file alone tells it."""
    path, name, source = _read(spec)
    try:
        tree = ast.parse(source, str(path))
    except (SyntaxError, ValueError) as error:
        raise _unloadable(spec, path, error) from error
    found = {one.name: one for one in tree.body if isinstance(one, ast.FunctionDef)}
    if name in found:
        is_plain = not found[name].decorator_list
        return "series" if is_plain and _annotated(found[name]) in _SERIES else None
    if not {name, *_DYNAMIC} & _named(tree):
        there = ", ".join(found) or "no function"
        raise InvalidArgument(f"function {spec!r}: the file has no `{name}`; it has {there}")
    return None


def _read(spec: str) -> tuple[Path, str, str]:
    """The file, the function's name, and what is in the file."""
    path_text, colon, name = spec.strip().rpartition(":")
    if not colon or not path_text or not name.isidentifier():
        raise InvalidArgument(f"function {spec!r} does not fit; it takes {TAKES}")
    path = Path(path_text).expanduser().absolute()
    try:
        return path, name, path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InvalidArgument(f"function {spec!r}: there is no file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"function {spec!r}: {path} cannot be read: {error}") from error


def _unloadable(spec: str, path: Path, error: BaseException) -> InvalidArgument:
    told = _told(error, str(path))
    return InvalidArgument(f"function {spec!r}: the file fails when it is loaded: {told}")


# -- the file as a text ----------------------------------------------------------------------------

_DYNAMIC = {"*", "__getattr__", "exec", "globals", "locals", "setattr", "vars"}
"""With one of these a file may have names that it does not show."""

_SERIES = ("pd.Series", "pandas.Series")


def _named(tree: ast.Module) -> set[str]:
    """All names in the file; those it binds are among them."""
    found: set[str] = set()
    for one in ast.walk(tree):
        if isinstance(one, ast.Name):
            found.add(one.id)
        elif isinstance(one, ast.alias):
            found.add(one.asname or one.name.partition(".")[0])
        elif isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(one.name)
    return found


def _annotated(function: ast.FunctionDef) -> str:
    """What the first parameter is said to be, as it is written."""
    taken = [*function.args.posonlyargs, *function.args.args]
    said = taken[0].annotation if taken else None
    if isinstance(said, ast.Constant):
        return str(said.value)
    return "" if said is None else ast.unparse(said)


# -- the file as a module --------------------------------------------------------------------------


def _module(path: str, source: str) -> ModuleType:
    """Once a process and text: Spark keeps its Python workers, so each loads a model once."""
    digest = hashlib.sha256(f"{path}\n{source}".encode()).hexdigest()[:16]
    name = _OF_FILE + digest
    made = sys.modules.get(name)
    if made is not None:
        return made
    module = ModuleType(name)
    module.__file__ = path
    # Where the file is not, its lines are still told in a traceback.
    linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
    sys.modules[name] = module  # dataclasses look their module up while it is run
    try:
        exec(compile(source, path, "exec"), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    # A UDF that a frame's function makes is pickled by Spark; no executor can import its module.
    cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
    return module


def _missing(module: ModuleType, name: str) -> str:
    if hasattr(module, name):
        return f"`{name}` is a {type(getattr(module, name)).__name__}, and no function"
    there = [
        each
        for each, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__
    ]
    return f"the file has no `{name}`; it has {', '.join(there) or 'no function'}"


def _told(error: BaseException, path: str) -> str:
    said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, SyntaxError) and error.filename == path:
        return f"SyntaxError: {error.msg} ({path}:{error.lineno})"
    lines = [at.lineno for at in traceback.extract_tb(error.__traceback__) if at.filename == path]
    return f"{said} ({path}:{lines[-1]})" if lines else said


# -- its kind --------------------------------------------------------------------------------------


def _kind(spec: str, function: Callable[..., Any]) -> FunctionKind:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return "row"  # a callable of C
    needed = [one for one in parameters if one.default is one.empty and _is_positional(one)]
    if not parameters or not _is_positional(parameters[0]) or len(needed) > 1:
        raise InvalidArgument(
            f"function {spec!r} has to take one argument: a row as a dict, a value as `str`, values"
            " as `pandas.Series` or rows as Spark's `DataFrame`"
        )
    said = _annotation(function, parameters[0])
    if said in ("pyspark.sql.DataFrame", "DataFrame"):
        return "frame"
    if said == "pandas.Series":
        return "series"
    if said == "pandas.DataFrame":
        raise InvalidArgument(
            f"function {spec!r} takes a DataFrame of pandas; take a Series of values, or rows"
        )
    return "value" if said == "str" else "row"


def _is_positional(parameter: inspect.Parameter) -> bool:
    return parameter.kind in (
        parameter.POSITIONAL_ONLY,
        parameter.POSITIONAL_OR_KEYWORD,
        parameter.VAR_POSITIONAL,
    )


def _annotation(function: Callable[..., Any], parameter: inspect.Parameter) -> str:
    """The type's name with the package it is known by; blank when there is none."""
    asked = function if inspect.isroutine(function) else type(function).__call__
    try:
        kind = typing.get_type_hints(asked).get(parameter.name)
    except (NameError, TypeError, AttributeError):
        kind = parameter.annotation  # a name that only type checkers import
    if isinstance(kind, str):
        return {"pd.Series": "pandas.Series", "pd.DataFrame": "pandas.DataFrame"}.get(kind, kind)
    if not isinstance(kind, type):
        return ""
    package = kind.__module__.partition(".")[0]
    if package == "pyspark" and kind.__name__ == "DataFrame":
        return "pyspark.sql.DataFrame"
    return f"pandas.{kind.__name__}" if package == "pandas" else kind.__name__
