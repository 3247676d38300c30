"""Run the tests on each supported Python: `nox`, or `nox -s tests-3.13 -- tests/unit`.

A version without an interpreter on this machine is skipped, and nox names it.
"""

from __future__ import annotations

import nox

nox.needs_version = ">=2026.10"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"


@nox.session(python=["3.11", "3.12", "3.13", "3.14"])
def tests(session: nox.Session) -> None:
    """Install everything in a new environment and run pytest; arguments after `--` go to pytest."""
    session.install("--editable", ".[all]", "--constraint", "constraints.txt")
    # Tests of one file share brokers and Spark sessions.
    arguments = session.posargs or ["--numprocesses", "2", "--dist", "loadfile"]
    session.run("python", "-m", "pytest", *arguments)
