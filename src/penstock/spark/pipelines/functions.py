"""Finds and loads a user's function, `path/file.py:name`, and determines its kind.

Invariant: an error in the file is reported with the file and its line, before a query starts. A
function travels as the text of its file, and every process that calls it runs that text once. So
objects that the file makes at import, such as a model or a connection, need not be picklable. Must
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

_MODULE_PREFIX = "penstock_function_"


@dataclass(frozen=True)
class UserFunction:
    """A function of a user's file. It is sent to the executors, and loads its module there."""

    path: str
    name: str
    kind: FunctionKind
    source: str = field(repr=False)

    def callable(self) -> Callable[[Any], Any]:
        found: Callable[[Any], Any] = getattr(_module(self.path, self.source), self.name)
        return found

    def describe(self, error: BaseException) -> str:
        """Describes an error by type, text and, if the file is in its stack, line."""
        return _describe(error, self.path)


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


def inspect_text(spec: str) -> FunctionKind | None:
    """Checks a function without running its file, which may need Spark or take long. Raises if the
    file cannot be parsed or has no such function. Returns the kind, if the text alone shows it."""
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
    """Returns the path of the file, the function's name and the text of the file."""
    path_text, colon, name = spec.strip().rpartition(":")
    if not colon or not path_text or not name.isidentifier():
        raise InvalidArgument(f"function {spec!r} is not allowed; it takes {TAKES}")
    path = Path(path_text).expanduser().absolute()
    try:
        return path, name, path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InvalidArgument(f"function {spec!r}: there is no file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"function {spec!r}: {path} cannot be read: {error}") from error


def _unloadable(spec: str, path: Path, error: BaseException) -> InvalidArgument:
    described = _describe(error, str(path))
    return InvalidArgument(f"function {spec!r}: the file fails when it is loaded: {described}")


# -- the text of the file --------------------------------------------------------------------------

_DYNAMIC = {"*", "__getattr__", "exec", "globals", "locals", "setattr", "vars"}
"""Names with which a file may define others that its text does not show."""

_SERIES = ("pd.Series", "pandas.Series")


def _named(tree: ast.Module) -> set[str]:
    """Returns all names in the file, defined there or not."""
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
    """Returns the annotation of the first parameter, as it is written."""
    taken = [*function.args.posonlyargs, *function.args.args]
    annotation = taken[0].annotation if taken else None
    if isinstance(annotation, ast.Constant):
        return str(annotation.value)
    return "" if annotation is None else ast.unparse(annotation)


# -- the file as a module --------------------------------------------------------------------------


def _module(path: str, source: str) -> ModuleType:
    """Loads the text as a module, once in a process, which keeps a model that it loads."""
    digest = hashlib.sha256(f"{path}\n{source}".encode()).hexdigest()[:16]
    name = _MODULE_PREFIX + digest
    made = sys.modules.get(name)
    if made is not None:
        return made
    module = ModuleType(name)
    module.__file__ = path
    # So that tracebacks show its lines on machines that do not have the file.
    linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
    sys.modules[name] = module  # dataclasses look up their module while it runs
    try:
        exec(compile(source, path, "exec"), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    # Spark pickles the UDFs of a function of frames, and no executor can import their module.
    cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
    return module


def _missing(module: ModuleType, name: str) -> str:
    if hasattr(module, name):
        return f"`{name}` is a {type(getattr(module, name)).__name__}, not a function"
    there = [
        each
        for each, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__
    ]
    return f"the file has no `{name}`; it has {', '.join(there) or 'no function'}"


def _describe(error: BaseException, path: str) -> str:
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, SyntaxError) and error.filename == path:
        return f"SyntaxError: {error.msg} ({path}:{error.lineno})"
    lines = [at.lineno for at in traceback.extract_tb(error.__traceback__) if at.filename == path]
    return f"{text} ({path}:{lines[-1]})" if lines else text


# -- its kind --------------------------------------------------------------------------------------


def _kind(spec: str, function: Callable[..., Any]) -> FunctionKind:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return "row"  # a callable without a signature, such as one written in C
    needed = [one for one in parameters if one.default is one.empty and _is_positional(one)]
    if not parameters or not _is_positional(parameters[0]) or len(needed) > 1:
        raise InvalidArgument(
            f"function {spec!r} must take one argument: a row as a dict, a value as `str`, values"
            " as `pandas.Series` or rows as Spark's `DataFrame`"
        )
    annotation = _annotation(function, parameters[0])
    if annotation in ("pyspark.sql.DataFrame", "DataFrame"):
        return "frame"
    if annotation == "pandas.Series":
        return "series"
    if annotation == "pandas.DataFrame":
        raise InvalidArgument(
            f"function {spec!r} takes a pandas DataFrame; let it take a Series of values, or rows"
        )
    return "value" if annotation == "str" else "row"


def _is_positional(parameter: inspect.Parameter) -> bool:
    return parameter.kind in (
        parameter.POSITIONAL_ONLY,
        parameter.POSITIONAL_OR_KEYWORD,
        parameter.VAR_POSITIONAL,
    )


def _annotation(function: Callable[..., Any], parameter: inspect.Parameter) -> str:
    """Returns the type's name with its package; empty if there is no annotation."""
    annotated = function if inspect.isroutine(function) else type(function).__call__
    try:
        kind = typing.get_type_hints(annotated).get(parameter.name)
    except (NameError, TypeError, AttributeError):
        kind = parameter.annotation  # a name that is imported for type checkers only
    if isinstance(kind, str):
        return {"pd.Series": "pandas.Series", "pd.DataFrame": "pandas.DataFrame"}.get(kind, kind)
    if not isinstance(kind, type):
        return ""
    package = kind.__module__.partition(".")[0]
    if package == "pyspark" and kind.__name__ == "DataFrame":
        return "pyspark.sql.DataFrame"
    return f"pandas.{kind.__name__}" if package == "pandas" else kind.__name__
