"""Ids made by producers: namespaced, deterministic where asked, never running together."""

import hashlib
import json
import os
import re
import unicodedata
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from semel import keys
from semel.errors import KeyInvalid, KeyMissing

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=4).map(lambda text: unicodedata.normalize("NFC", text)),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=4).map(
    lambda text: unicodedata.normalize("NFC", text)
)


def of(*parts: object, **named: Any) -> str:
    return keys.of(*parts, namespace="shop", **named)


@pytest.mark.parametrize(("mint", "version"), [(keys.uuid4, 4), (keys.uuid7, 7)])
def test_minted_id_carries_its_namespace_and_kind(mint: Any, version: int) -> None:
    namespace, _, text = mint("billing").partition(":")
    assert namespace == "billing"
    assert UUID(text).version == version
    assert len({mint("billing") for _ in range(1_000)}) == 1_000


def test_time_ordered_ids_of_one_process_ascend() -> None:
    minted = [keys.uuid7("billing") for _ in range(1_000)]
    assert minted == sorted(minted)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system cannot fork")
@pytest.mark.parametrize("kind", ["uuid4", "uuid7"])
def test_forked_workers_do_not_mint_the_same_ids(kind: str) -> None:
    mint = getattr(keys, kind)
    mint("warm")  # whatever state there is exists before the fork
    outputs = []
    for _ in range(4):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writer, "\n".join(mint("w") for _ in range(20)).encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as output:
            outputs += output.read().split()
        os.waitpid(child, 0)
    assert len(set(outputs)) == len(outputs) == 80


@pytest.mark.parametrize("namespace", ["", "a:b", "a b", "-a", ".a", "é", "a\n", "a" * 65, None, 7, b"a"])
def test_namespace_that_could_be_mistaken_is_refused(namespace: Any) -> None:
    for make in (keys.uuid4, keys.uuid7, lambda name: keys.of(1, namespace=name)):
        with pytest.raises(KeyInvalid, match="namespace"):
            make(namespace)


def test_deterministic_id_is_the_documented_digest() -> None:
    """Another language can compute the same key from the page of the docs."""

    def netstring(text: bytes) -> bytes:
        return str(len(text)).encode() + b":" + text + b","

    fields = [b"shop", b"2", b"", b'"o-1"', b"amount", b"50", b"lines", b'[{"a":1,"b":null}]']
    expected = hashlib.sha256(b"semel.key.1" + b"".join(netstring(field) for field in fields)).hexdigest()
    made = keys.of("o-1", namespace="shop", version=2, lines=[{"b": None, "a": 1}], amount=Decimal("50.00"))
    assert made == f"shop:v2.{expected}"


def test_deterministic_ids_stay_what_they_were() -> None:
    """These literals are in users' databases: a change here runs their events again."""
    assert keys.of("o-1", namespace="shop") == (
        "shop:v1.3e528593fe5669bade96605001294fbac137b2e094e7e62ad58b4124b7fad9a0"
    )
    assert keys.of(namespace="shop", order="o-1", amount=Decimal("50.00")) == (
        "shop:v1.d5b05a745106ca4560cb97ef8d5cb7582ea6d0b13f65f282556a0935521f0d2a"
    )


def test_two_parts_that_concatenate_alike_get_different_keys() -> None:
    alike = [
        of("ab", "c"),
        of("a", "bc"),
        of("abc"),
        of("a:b", "c"),
        of("a", "b:c"),
        of("a|b", "c"),
        of("a", "b|c"),
        of(["ab", "c"]),
        of('ab","c'),
        of("ab", "c", ""),
        of("", "ab", "c"),
        of("ab", "c", None),
        of(1, 23),
        of(12, 3),
        of(123),
        of("123"),
    ]
    assert len(set(alike)) == len(alike)


def test_names_of_parts_count() -> None:
    alike = [
        of(user="7", order="9"),
        of(user="9", order="7"),
        of("7", "9"),
        of("9", "7"),
        of({"user": "7", "order": "9"}),
    ]
    assert len(set(alike)) == len(alike)
    assert of(user="7", order="9") == of(order="9", user="7")


def test_namespace_and_version_separate_recipes() -> None:
    digests = {
        keys.of("o-1", namespace=namespace, version=version).partition(".")[2]
        for namespace in ("shop", "billing")
        for version in (1, 2)
    }
    assert len(digests) == 4


@given(st.lists(values, min_size=1, max_size=4), st.lists(values, min_size=1, max_size=4))
@example([True], [1])
@example([[]], [[[]]])
def test_keys_are_equal_iff_the_parts_are(one: list[Any], other: list[Any]) -> None:
    if any(part is not None for part in one) and any(part is not None for part in other):
        same = json.dumps(one) == json.dumps(other)  # Python's == takes True for 1
        assert (of(*one) == of(*other)) == same


@given(st.dictionaries(texts.filter(bool), st.integers(), min_size=1, max_size=4), st.randoms())
def test_order_of_named_parts_does_not_matter(named: dict[str, int], random: Any) -> None:
    shuffled = list(named.items())
    random.shuffle(shuffled)
    reserved = {"namespace", "version", "allow_floats"}
    if not reserved & named.keys():
        assert of(**named) == of(**dict(shuffled))


def test_same_number_written_two_ways_is_one_key() -> None:
    same = {of(amount=amount) for amount in (50, Decimal(50), Decimal("50.00"), Decimal("5E1"))}
    assert len(same) == 1
    assert of(amount="50") not in same
    assert of(50.0, allow_floats=True) == of(50)


def test_unicode_form_of_a_name_does_not_matter() -> None:
    composed, decomposed = {"caf\u00e9": 1}, {"cafe\u0301": 1}
    assert of(**composed) == of(**decomposed)


def test_money_in_floats_is_refused() -> None:
    with pytest.raises(TypeError, match="Decimal"):
        of(amount=0.1 + 0.2)


def test_key_of_nothing_would_merge_everything_and_is_refused() -> None:
    for parts in ((), (None,), (None, None)):
        with pytest.raises(KeyMissing):
            of(*parts)
    with pytest.raises(KeyMissing):
        of(user=None)
    assert of("o-1", coupon=None) != of("o-1")
    with pytest.raises(KeyInvalid, match="empty name"):
        of(**{"": 1})


@pytest.mark.parametrize("version", [0, -1, True, 1.0, "1", 2**31])
def test_version_that_does_not_count_is_refused(version: Any) -> None:
    with pytest.raises(KeyInvalid, match="version"):
        of("o-1", version=version)


@given(st.text(st.sampled_from("ab-._9"), min_size=1, max_size=64))
def test_every_made_key_keeps_the_limits(namespace: str) -> None:
    if namespace[0] not in "-._":
        made = keys.of("x" * 10_000, namespace=namespace, version=2**31 - 1)
        assert keys.check(made) == made
        assert re.fullmatch(rf"{re.escape(namespace)}:v2147483647\.[0-9a-f]{{64}}", made)
