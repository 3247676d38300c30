"""A Java that lives for seconds, told so by the variable that Spark's own scripts read.

Less time goes into making it fast. With an archive of Spark's classes, which Java writes when it
ends, a start takes half of Java's work; making one takes as much as four starts save. So it is for
who starts Spark many times.
"""

from __future__ import annotations

from pathlib import Path

OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:MetaspaceSize=256m"


def quick_java(archive: Path | None = None) -> dict[str, str]:
    """For an environment. The first Java that ends makes the archive, those behind it use it."""
    options = OPTIONS
    if archive is not None:
        use = "SharedArchiveFile" if archive.exists() else "ArchiveClassesAtExit"
        # It would tell of classes that cannot be kept, between what is printed.
        options += f" -Xlog:disable -XX:{use}={archive}"
    return {"SPARK_SUBMIT_OPTS": options}
