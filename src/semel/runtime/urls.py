"""Read the options in the query of a URL, with the same errors for stores, caches, sources and sinks."""

from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from typing import Any, Literal, TypeVar, get_args, get_origin
from urllib.parse import SplitResult, parse_qsl, urlsplit

from msgspec import Struct
from msgspec.structs import fields

from semel.errors import PolicyInvalid

__all__ = ["check_names", "option_texts", "parse_url", "port_of", "read_options", "struct_options"]

AnyOptions = TypeVar("AnyOptions", bound=Struct)

_SWITCHES = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def parse_url(url: str) -> SplitResult:
    """Return the parts of a URL. Raises `PolicyInvalid` for a host that cannot be read.

    Errors name the scheme only: the rest of a URL may hold secrets.
    """
    try:
        return urlsplit(url)
    except ValueError as error:
        scheme = url.partition(":")[0]
        raise PolicyInvalid(
            f"{scheme}: the host in this URL cannot be read ({error}); write {scheme}://host:port, an IPv6 address in"
            " brackets"
        ) from None


def port_of(parts: SplitResult, default: int) -> int:
    """Return the port in a URL. Raises `PolicyInvalid` if it is not a port."""
    try:
        return parts.port or default
    except ValueError:
        raise PolicyInvalid(f"{parts.scheme}: the port is a number up to 65535, like {default}") from None


def option_texts(url: str) -> dict[str, str]:
    """Return the options of a URL as text. Raises `PolicyInvalid` for a repeated one.

    Errors name the scheme only: the rest of a URL may hold secrets.
    """
    parts = parse_url(url)
    if parts.fragment:
        raise PolicyInvalid(f"{parts.scheme}: a URL ends with its options; write # as %23")
    try:
        pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError:
        raise PolicyInvalid(f"{parts.scheme}: write options as ?name=value&name=value") from None
    texts: dict[str, str] = {}
    for name, text in pairs:
        if name in texts:
            raise _repeated_error(parts.scheme, name)
        texts[name] = text
    return texts


def read_options(
    url: str,
    kinds: Mapping[str, Any],
    *,
    given: Mapping[str, Any] | None = None,
    others: Collection[str] = (),
) -> dict[str, Any]:
    """Return the options of a URL and those `given` by name, each converted to its kind in `kinds`.

    A kind is `bool`, `int`, `float`, a `Literal` of texts, or anything else for a text. `others`: names of texts that
    are allowed too, such as a driver's. Raises `PolicyInvalid` for an unknown, repeated or wrong option.
    """
    scheme, texts, given = url.partition(":")[0], option_texts(url), given or {}
    check_names(scheme, [*texts, *given], kinds, others)
    for name in given:
        if name in texts:
            raise _repeated_error(scheme, name)
    return {
        name: _convert(scheme, name, value, kinds.get(name)) for name, value in {**texts, **given}.items()
    }


def struct_options(url: str, kind: type[AnyOptions], given: Mapping[str, Any] | None = None) -> AnyOptions:
    """Read the options of a URL and those `given` as a struct. Raises `PolicyInvalid`, also for a missing one."""
    known = fields(kind)
    options = read_options(url, {each.name: each.type for each in known}, given=given)
    for each in known:
        if each.required and each.name not in options:
            raise PolicyInvalid(f"{url.partition(':')[0]}: needs the option {each.name}")
    return kind(**options)


def check_names(
    scheme: str, names: Iterable[str], known: Collection[str], others: Collection[str] = ()
) -> None:
    """Raise `PolicyInvalid` for the first name that is neither `known` nor one of the `others`."""
    for name in names:
        if name not in known and name not in others:
            near = get_close_matches(name, (*known, *others), 1)
            hint = f"did you mean {near[0]}? Its" if near else "its"
            more = " and those of its driver" if others else ""
            raise PolicyInvalid(
                f"{scheme}: has no option {name}; {hint} options are {', '.join(known)}{more}"
            )


def _repeated_error(scheme: str, name: str) -> PolicyInvalid:
    return PolicyInvalid(f"{scheme}: has the option {name} twice; give it once")


def _convert(scheme: str, name: str, value: Any, kind: Any) -> Any:
    """Convert a text to its kind; values of other types were given by name and stay."""
    if get_origin(kind) is Literal:
        if value in get_args(kind):
            return value
        wanted = " or ".join(get_args(kind))
    elif not isinstance(value, str) or kind not in (bool, int, float):
        return value
    elif kind is bool:
        if value.lower() in _SWITCHES:
            return _SWITCHES[value.lower()]
        wanted = "true or false"
    else:
        try:
            return kind(value)
        except ValueError:
            wanted = "a number" if kind is float else "a whole number"
    raise PolicyInvalid(f"{scheme}: {name} is {value!r}; it must be {wanted}")
