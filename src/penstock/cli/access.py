"""`penstock access`: grant, revoke, list and check permissions; and roles."""

from __future__ import annotations

import click

from penstock.cli.connection import json_flag, with_client
from penstock.cli.scope import namespace_option, tenant_option
from penstock.cli.terminal import CommandFailed, printable, show, show_json, show_table
from penstock.client.results import GrantedRule
from penstock.client.sync import Client
from penstock.model.access import BROKER

_resource = click.option(
    "--resource", "-r", default="*", show_default=True, metavar="KIND:NAME",
    help="* for everything, or topic:orders, topic:orders*, stream:…, cache:…, producer:…, "
    "namespace:…, tenant:…; or broker, the broker itself.",
)  # fmt: skip


@click.group()
def access() -> None:
    """Say who may do what."""


@access.command()
@click.argument("who")
@click.argument("permissions", nargs=-1, required=True)
@click.option("--role", "is_role", is_flag=True, help="WHO is a role: all who have it get them.")
@tenant_option
@click.option("--namespace", "-n", default="*", show_default=True, help="Namespace, or pattern.")
@_resource
@json_flag
@with_client
def grant(
    client: Client,
    who: str,
    permissions: tuple[str, ...],
    is_role: bool,
    tenant_id: str,
    namespace: str,
    resource: str,
    as_json: bool,
) -> None:
    """Give WHO these PERMISSIONS, or the permissions of roles, on a tenant's resources."""
    of_broker = resource == BROKER
    rule = client.grant_access(
        permissions,
        principal="" if is_role else who,
        role=who if is_role else "",
        tenant_id="" if of_broker else tenant_id,
        namespace="" if of_broker else namespace,
        resource=resource,
    )
    if as_json:
        show_json(rule)
    else:
        show(f"rule {rule.id}: {_who(rule)} has {', '.join(rule.permissions)} on {_where(rule)}")


@access.command()
@click.argument("rule", type=int)
@with_client
def revoke(client: Client, rule: int) -> None:
    """Remove the rule with the number RULE. In effect at once."""
    client.revoke_access(rule)
    show(f"rule {rule} is revoked")


@access.command("list")
@click.option("--tenant", "-t", "tenant_id", default="", help="Only the rules of this tenant.")
@click.option("--principal", default="", help="Only the rules for this principal.")
@json_flag
@with_client
def list_(client: Client, tenant_id: str, principal: str, as_json: bool) -> None:
    """List the rules that you may change, and those for yourself."""
    rules = client.list_access_rules(tenant_id=tenant_id, principal=principal)
    if as_json:
        show_json({"rules": rules})
        return
    rows = [(rule.id, _who(rule), ", ".join(rule.permissions), _where(rule)) for rule in rules]
    show_table(("rule", "who", "permissions", "where"), rows)


@access.command()
@click.argument("principal")
@click.argument("permission")
@click.argument("resource")
@click.option("--roles", default="", metavar="NAME,…", help="The roles of the principal's token.")
@tenant_option
@namespace_option
@json_flag
@with_client
def check(
    client: Client,
    principal: str,
    permission: str,
    resource: str,
    roles: str,
    tenant_id: str,
    namespace: str,
    as_json: bool,
) -> None:
    """Say whether PRINCIPAL has PERMISSION on RESOURCE, as topic:orders, and why. Exits with 1 if
    not."""
    found = client.check_access(
        permission,
        resource,
        principal=principal,
        roles=[role for role in roles.split(",") if role],
        tenant_id=tenant_id,
        namespace=namespace,
    )
    if as_json:
        show_json(found)
    elif found.allowed:
        show(f"allowed: {printable(found.reason)}")
    if not found.allowed:
        raise CommandFailed(f"denied: {printable(found.reason)}")


@access.group()
def role() -> None:
    """Name sets of permissions."""


@role.command("set")
@click.argument("name")
@click.argument("permissions", nargs=-1, required=True)
@tenant_option
@with_client
def set_(client: Client, name: str, permissions: tuple[str, ...], tenant_id: str) -> None:
    """Create the role NAME, or change it to these PERMISSIONS."""
    found = client.set_role(name, permissions, tenant_id=tenant_id)
    show(f"role {printable(found.name)} has {', '.join(found.permissions)}")


@role.command("list")
@tenant_option
@json_flag
@with_client
def list_roles(client: Client, tenant_id: str, as_json: bool) -> None:
    """List the built-in roles and those of the tenant."""
    roles = client.list_roles(tenant_id=tenant_id)
    if as_json:
        show_json({"roles": roles})
        return
    show_table(
        ("role", "permissions"),
        [(printable(each.name), ", ".join(each.permissions)) for each in roles],
    )


@role.command()
@click.argument("name")
@tenant_option
@with_client
def remove(client: Client, name: str, tenant_id: str) -> None:
    """Remove the role NAME. Refused while a rule names it."""
    client.remove_role(name, tenant_id=tenant_id)
    show(f"role {printable(name)} is removed")


def _who(rule: GrantedRule) -> str:
    return printable(rule.principal) if rule.principal else f"role {printable(rule.role)}"


def _where(rule: GrantedRule) -> str:
    if not rule.tenant_id:
        return "the broker"
    return printable(f"{rule.tenant_id}/{rule.namespace} {rule.resource}")
