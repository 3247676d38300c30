"""The schema of a table: how it is stored, how it may change, and rows made to fit it.

Invariant: rows in the table can be read with every later schema. So a column may be added, but not
dropped or given another type. Must not know where the schema is stored.
"""

from __future__ import annotations

import msgspec
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql.types import StructType

from penstock.model.errors import FailedPrecondition, InvalidArgument

FORMAT = 1


class TableSchema(msgspec.Struct, frozen=True):
    """`schema` has columns and types as Spark writes them."""

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
    """Raises if rows of the stored schema do not fit this one. A reader may leave columns out."""
    wanted = TableSchema.of(schema, partition_by)
    if kept.format != FORMAT:
        raise FailedPrecondition(
            f"{path} is a table of format {kept.format}, and this version reads {FORMAT}: use the "
            "newer version that made it"
        )
    if kept.partition_by != wanted.partition_by:
        raise FailedPrecondition(
            f"{path} is partitioned by {_list(kept.partition_by)}, not by "
            f"{_list(wanted.partition_by)}: {_OTHERWISE}"
        )
    for name, kind in kept.schema.items():
        found = wanted.schema.get(name)
        if found is None and not is_read:
            raise FailedPrecondition(
                f"{path} has a column {name}, which would be dropped: keep it, with nulls if it "
                f"has no values. Or {_OTHERWISE}"
            )
        if found is not None and found != kind:
            raise FailedPrecondition(
                f"{path}: column {name} is {kind}, not {found}: give the new column another name. "
                f"Or {_OTHERWISE}"
            )


_OTHERWISE = "write to another lake, or move the table away to start again"


def _list(columns: list[str]) -> str:
    return ", ".join(columns) or "nothing"


def fitted(frame: DataFrame, path: str, schema: StructType) -> DataFrame:
    """Returns the frame with the table's columns, in its order and types."""
    for name in schema.names:
        if name not in frame.columns:
            raise InvalidArgument(f"the rows for {path} have no column {name}")
    for name in frame.columns:
        if name not in schema.names:
            raise InvalidArgument(
                f"the rows for {path} have a column {name}, which the table does not have; it has "
                f"{', '.join(schema.names)}"
            )
    return frame.select(
        *(F.col(f"`{field.name}`").cast(field.dataType).alias(field.name) for field in schema)
    )
