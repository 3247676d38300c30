"""Commands with a token for one tenant: they work in that tenant, and refusals name it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from tests.broker_process import BrokerProcess
from tests.cli.conftest import Ran, call_penstock

TOKEN = re.compile(r"pst_[0-9a-f]{16}_[A-Za-z0-9_-]{43}")


class Acme:
    """A broker with access control, and an admin of its tenant `acme`."""

    def __init__(self, process: BrokerProcess) -> None:
        self.url = process.url
        self.root = TOKEN.findall(process.stdout())[0]
        for command in (
            ("tenant", "create", "acme"),
            ("namespace", "create", "default", "-t", "acme"),
            ("namespace", "create", "prod", "-t", "acme"),
        ):
            assert self.run(*command, token=self.root).code == 0
        self.token = self.new_token("acme-admin", "--tenant", "acme", "--admin")

    def new_token(self, *words: str) -> str:
        made = self.run("token", "create", *words, token=self.root)
        assert made.code == 0, made.err
        return made.out.strip()

    def run(self, *words: str, token: str = "") -> Ran:
        env = {"PENSTOCK_URL": self.url, "PENSTOCK_TOKEN": token or self.token}
        return call_penstock(*words, env=env)


@pytest.fixture(scope="module")
def acme() -> Iterator[Acme]:
    with BrokerProcess(None, "--access-control") as process:
        yield Acme(process)


def test_without_a_tenant_every_command_is_about_the_tenant_of_the_token(acme: Acme) -> None:
    assert acme.run("topic", "create", "orders").code == 0
    assert "acme/default/ev" in acme.run("stream", "create", "ev").out
    assert "acme/default/hot" in acme.run("cache", "create", "hot").out
    assert acme.run("cache", "put", "hot", "k", "v").code == 0
    assert acme.run("publish", "ev", "hello").code == 0
    assert "ev" in acme.run("stream", "list").out
    assert "hot" in acme.run("cache", "list").out
    assert "acme/staging" in acme.run("namespace", "create", "staging").out
    assert "acme/* *" in acme.run("access", "grant", "bob", "reader").out
    assert acme.run("access", "role", "set", "packer", "consume").code == 0
    assert acme.run("access", "check", "bob", "read", "topic:orders").code == 0
    # The tenant `default` has nothing of this.
    assert "ev" not in acme.run("stream", "list", "-t", "default", token=acme.root).out


def test_a_namespace_of_the_token_is_where_its_commands_are(acme: Acme) -> None:
    token = acme.new_token("p", "--tenant", "acme", "--namespace", "prod", "--role", "operator")
    assert "acme/prod/only" in acme.run("stream", "create", "only", token=token).out
    created = acme.run("stream", "create", "x", "-n", "default", token=token)
    assert created.code == 1
    assert "your credential is for namespace 'prod': name it" in created.err


def test_a_refusal_of_another_tenant_names_the_tenant_of_the_token(acme: Acme) -> None:
    """felix-95: the refusal says nothing about the other tenant."""
    asked = acme.run("stream", "create", "x", "-t", "default")
    assert asked.code == 1
    hint = "your credential is for tenant 'acme': name it (X-Penstock-Tenant, -t acme)"
    assert f"on stream 'x' of 'default/default'; {hint}" in asked.err
    assert hint in acme.run("access", "grant", "bob", "reader", "-t", "default").err
    assert hint in acme.run("access", "role", "set", "r", "read", "-t", "default").err
    header = acme.run("topic", "list", "-t", "default")
    assert "your credential is for tenant 'acme': name that, or leave it out" in header.err


def test_a_refusal_names_a_tenant_or_a_namespace_once(acme: Acme) -> None:
    token = acme.new_token("nobody", "--tenant", "acme")
    refused = acme.run("namespace", "create", "n", token=token)
    assert "on namespace 'n' of 'acme'\n" in refused.err
    tenant = acme.run("quota", "show", "default", token=token)
    assert "on tenant 'default';" in tenant.err


def test_whoami_shows_principal_roles_and_reach(acme: Acme) -> None:
    token = acme.new_token("ann", "--tenant", "acme", "--role", "reader", "--expires-in", "1d")
    shown = acme.run("whoami", token=token)
    assert shown.out.startswith("ann\nroles     reader\n")
    assert "works in  acme/default, and in no other tenant\nuntil     20" in shown.out
    found = json.loads(acme.run("whoami", "--json", token=acme.root).out)
    assert (found["tenant_id"], found["is_bound"], found["admin"]) == ("default", False, True)


def test_whoami_without_access_control_says_so(broker: BrokerProcess) -> None:
    shown = call_penstock("whoami", env={"PENSTOCK_URL": broker.url})
    assert shown.out.startswith("the broker has no access control")
