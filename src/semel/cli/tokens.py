"""`semel token`: who may use the service, for which tenant, in which role."""

from typing import Annotated, Any

import typer

from semel.cli.exits import NOT_FOUND, USAGE, Stop
from semel.cli.help import App
from semel.cli.options import JsonOption, StoreOption, TenantOption, YesOption, settings_for, text
from semel.cli.output import confirm, local_time, print_json, print_rows, say
from semel.cli.reach import opened
from semel.server import tokens
from semel.server.tokens import Role, Token

__all__ = ["token"]

token: App = App()

AllOption = Annotated[bool, typer.Option("--all-tenants", help="It may act for every tenant.")]


@token.command("create")
def create_token(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Who gets it, for people.", callback=text)],
    role: Annotated[Role, typer.Option("--role", help="What it may do.")] = "write",
    store: StoreOption = None,
    tenant: TenantOption = None,
    *,
    all_tenants: AllOption = False,
    as_json: JsonOption = False,
) -> None:
    """Make a token for the service and print it, once: only its digest is kept.

    read: look records up. write: claim, complete and send events. admin: everything of its tenant. Without --tenant
    it reaches the records of no tenant.
    """
    settings = settings_for(store=store, tenant=tenant)
    if all_tenants and settings.tenant is not None:
        raise Stop("give --tenant or --all-tenants, not both", USAGE)
    with opened(settings, create=True) as reach:
        whose = None if all_tenants else settings.tenant or ""
        made, secret = reach.carry_out(tokens.create(name, whose, role))
    if as_json:
        print_json({**_shown(made), "token": secret})
        return
    say(f"Token {made.id} for {name!r}, role {role}. It is shown once:")
    print(secret)


@token.command("list")
def list_tokens(store: StoreOption = None, *, as_json: JsonOption = False) -> None:
    """List the tokens, never their secrets."""
    with opened(settings_for(store=store)) as reach:
        found: list[Token] = reach.carry_out(tokens.tokens())
    if as_json:
        print_json({"tokens": [_shown(each) for each in found]})
        return
    if not found:
        say("There is no token yet: semel token create NAME")
        return
    headers = ("ID", "NAME", "ROLE", "TENANT", "CREATED")
    rows = [
        (each.id, each.name, each.role, _whose(each), local_time(each.created_at, "seconds"))
        for each in found
    ]
    print_rows(headers, rows)


@token.command("revoke")
def revoke_token(
    token_id: Annotated[
        str, typer.Argument(metavar="ID", help="As `semel token list` shows it.", callback=text)
    ],
    store: StoreOption = None,
    *,
    yes: YesOption = False,
) -> None:
    """Make a token worthless, everywhere within seconds."""
    with opened(settings_for(store=store)) as reach:
        found: Token | None = reach.carry_out(tokens.lookup(token_id))
        if found is None:
            raise Stop(f"there is no token {token_id!r}: semel token list", NOT_FOUND)
        confirm(f"Revoke the token of {found.name!r}, role {found.role}?", yes=yes)
        reach.carry_out(tokens.revoke(token_id))
    say(f"Revoked the token {token_id} of {found.name!r}; servers refuse it within seconds.")


def _shown(each: Token) -> dict[str, Any]:
    return {
        "id": each.id,
        "name": each.name,
        "role": each.role,
        "tenant": each.tenant,
        "all_tenants": each.tenant is None,
        "created_at": local_time(each.created_at),
    }


def _whose(each: Token) -> str:
    return "(all)" if each.tenant is None else each.tenant or "(none)"
