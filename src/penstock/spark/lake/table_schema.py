"""The schema of a table: as it is kept, as it may change, and rows made to fit it.

Invariant: rows that are in the table can be read with every later schema. So a column may be added,
and none dropped or given another type. Must not know where it is kept.
"""

from __future__ import annotations

import msgspec
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql.types import StructType

from penstock.model.errors import FailedPrecondition, InvalidArgument

FORMAT = 1


class TableSchema(msgspec.Struct, frozen=True):
    """`schema` is columns and types in Spark's words."""

    format: int
    schema: dict[str, str]
    partition_by: list[str]

    @classmethod
    def of(cls, schema: StructType, partition_by: tuple[str, ...]) -> TableSchema:
        columns = {field.name: field.dataType.simpleString() for field in schema.fields}
        for column in partition_by:
            if column not in columns:
                raise InvalidArgument(f"there is no column {column} to partition by")
        return cls(FORMAT, columns, list(partition_by))


def check_added(
    path: str,
    kept: TableSchema,
    schema: StructType,
    partition_by: tuple[str, ...],
    *,
    is_read: bool = False,
) -> None:
    """May a table that was kept so be used with this schema? A reader may leave columns out."""
    wanted = TableSchema.of(schema, partition_by)
    if kept.format != FORMAT:
        raise FailedPrecondition(
            f"{path} is a table of format {kept.format}, and this is format {FORMAT}; it was made "
            "by a newer version: use that one"
        )
    if kept.partition_by != wanted.partition_by:
        raise FailedPrecondition(
            f"{path} is partitioned by {_list(kept.partition_by)}, not by "
            f"{_list(wanted.partition_by)}: {_CURE}"
        )
    for name, kind in kept.schema.items():
        found = wanted.schema.get(name)
        if found is None and not is_read:
            raise FailedPrecondition(
                f"{path} has a column {name}, which would be dropped: keep it, with nulls if there "
                f"is nothing to put into it. Or {_CURE}"
            )
        if found is not None and found != kind:
            raise FailedPrecondition(
                f"{path}: column {name} is {kind}, not {found}: give the new one another name. Or "
                f"{_CURE}"
            )


_CURE = "write to another lake, or move the table away and begin anew"


def _list(columns: list[str]) -> str:
    return ", ".join(columns) or "nothing"


def fitted(frame: DataFrame, path: str, schema: StructType) -> DataFrame:
    """The columns of the table, in its order and types."""
    for name in schema.names:
        if name not in frame.columns:
            raise InvalidArgument(f"the rows for {path} have no column {name}")
    for name in frame.columns:
        if name not in schema.names:
            raise InvalidArgument(
                f"the rows for {path} have a column {name}, which the table has not; it has "
                f"{', '.join(schema.names)}"
            )
    return frame.select(
        *(F.col(f"`{field.name}`").cast(field.dataType).alias(field.name) for field in schema)
    )
