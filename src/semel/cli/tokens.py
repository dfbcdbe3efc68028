"""`semel token`: tokens for the service."""

from typing import Annotated, Any

import typer

from semel.cli.help import App
from semel.cli.options import (
    JsonOption,
    StoreOption,
    TenantOption,
    YesOption,
    parse_duration_us,
    settings_for,
    text,
)
from semel.cli.output import NOT_FOUND, USAGE, CommandExit, confirm, print_json, print_rows, say
from semel.cli.store_access import StoreAccess, open_store
from semel.observe.formatting import duration_text, local_time, now_us
from semel.server import tokens
from semel.server.tokens import Role, Token

__all__ = ["token"]

token: App = App()

TokenId = Annotated[str, typer.Argument(metavar="ID", help="As `semel token list` shows it.", callback=text)]
ExpiresOption = Annotated[
    int | None,
    typer.Option(
        "--expires",
        metavar="DURATION",
        parser=parse_duration_us,
        help="How long it is valid, such as 90d.",
        show_default="until revoked",
    ),
]
AllOption = Annotated[bool, typer.Option("--all-tenants", help="The token is valid for every tenant.")]


@token.command("create")
def create_token(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A name for people, such as the user's.", callback=text)
    ],
    role: Annotated[Role, typer.Option("--role", help="The role.")] = "write",
    store: StoreOption = None,
    tenant: TenantOption = None,
    expires: ExpiresOption = None,
    *,
    all_tenants: AllOption = False,
    as_json: JsonOption = False,
) -> None:
    """Create a token for the service and print it once: only its digest is stored.

    read: look records up. write: claim, complete and send events. admin: everything of its tenant. Without --tenant
    it can use no tenant's records.
    """
    settings = settings_for(store=store, tenant=tenant)
    if all_tenants and settings.tenant is not None:
        raise CommandExit("give --tenant or --all-tenants, not both", USAGE)
    with open_store(settings, create=True) as reach:
        whose = None if all_tenants else settings.tenant or ""
        made, secret = reach.carry_out(tokens.create(name, whose, role, expires))
    _print_new(made, secret, as_json=as_json)


def _print_new(made: Token, secret: str, *, as_json: bool) -> None:
    if as_json:
        print_json({**_to_json(made, {}), "token": secret})
        return
    until = f", until {local_time(made.expires_at, 'seconds')}" if made.expires_at else ""
    say(f"Token {made.id} for {made.name!r}, role {made.role}{until}. It is shown once:")
    print(secret)


@token.command("list")
def list_tokens(store: StoreOption = None, *, as_json: JsonOption = False) -> None:
    """List the tokens, never their secrets."""
    with open_store(settings_for(store=store)) as reach:
        found: list[Token] = reach.carry_out(tokens.tokens())
        used: dict[str, int] = reach.carry_out(tokens.last_uses())
    if as_json:
        print_json({"tokens": [_to_json(each, used) for each in found]})
        return
    if not found:
        say("There is no token yet: semel token create NAME")
        return
    headers = ("ID", "NAME", "ROLE", "TENANT", "CREATED", "EXPIRES", "LAST USED")
    rows = [
        (
            each.id,
            each.name,
            each.role,
            _whose(each),
            local_time(each.created_at, "seconds"),
            _expiry(each),
            local_time(used[each.id], "seconds") if each.id in used else "-",
        )
        for each in found
    ]
    print_rows(headers, rows)


@token.command("rotate")
def rotate_token(
    token_id: TokenId,
    store: StoreOption = None,
    grace: Annotated[
        int,
        typer.Option(
            "--grace",
            metavar="DURATION",
            parser=parse_duration_us,
            help="How long the old one stays valid.",
            show_default="24h",
        ),
    ] = tokens.GRACE_US,
    expires: ExpiresOption = None,
    *,
    as_json: JsonOption = False,
) -> None:
    """Replace a token by a new one and print it once: both are valid until the grace period ends.

    It has the same name, role and tenant, and the same lifetime unless --expires is given.
    """
    with open_store(settings_for(store=store)) as reach:
        found = _find(reach, token_id)
        made, secret = reach.carry_out(tokens.rotate(found, expires, grace))
    _print_new(made, secret, as_json=as_json)
    if not as_json:
        say(f"The old one, {token_id}, is valid for another {duration_text(grace)}.")


@token.command("revoke")
def revoke_token(
    token_id: TokenId,
    store: StoreOption = None,
    *,
    yes: YesOption = False,
) -> None:
    """Revoke a token; every server refuses it within seconds."""
    with open_store(settings_for(store=store)) as reach:
        found = _find(reach, token_id)
        confirm(f"Revoke the token of {found.name!r}, role {found.role}?", yes=yes)
        reach.carry_out(tokens.revoke(token_id))
    say(f"Revoked the token {token_id} of {found.name!r}; servers refuse it within seconds.")


def _find(reach: StoreAccess, token_id: str) -> Token:
    found: Token | None = reach.carry_out(tokens.lookup(token_id))
    if found is None:
        raise CommandExit(f"there is no token {token_id!r}: semel token list", NOT_FOUND)
    return found


def _expiry(each: Token) -> str:
    if not each.expires_at:
        return "never"
    return "over" if each.is_over(now_us()) else local_time(each.expires_at, "seconds")


def _to_json(each: Token, used: dict[str, int]) -> dict[str, Any]:
    return {
        "id": each.id,
        "name": each.name,
        "role": each.role,
        "tenant": each.tenant,
        "all_tenants": each.tenant is None,
        "created_at": local_time(each.created_at),
        "expires_at": local_time(each.expires_at) if each.expires_at else None,
        "last_used_at": local_time(used[each.id]) if each.id in used else None,
    }


def _whose(each: Token) -> str:
    return "(all)" if each.tenant is None else each.tenant or "(none)"
