"""Keys and times of records, and the contract about partitions."""

from datetime import UTC, datetime
from typing import Any
from zlib import crc32

import pytest

from semel.errors import KeyInvalid, KeyMissing, MessageInvalid, UsageError
from semel.streams.contract import LOOKED_MAX, PartitionContract, murmur2
from semel.streams.reading import AHEAD_MAX_S, key_reader, now_us, parse_time_us, time_reader_for

AT_US = 1_794_931_610_000_000


class FakeRecord:
    """What the client hands out, without a broker."""

    def __init__(
        self, value: bytes | None = b"", key: bytes | None = None, *headers: tuple[str, bytes]
    ) -> None:
        self._value, self._key, self._headers = value, key, list(headers)
        self.at_ms = 0
        self.number = 0

    def value(self) -> bytes | None:
        return self._value

    def key(self) -> bytes | None:
        return self._key

    def headers(self) -> Any:
        return self._headers or None

    def timestamp(self) -> tuple[int, int]:
        return 1, self.at_ms

    def partition(self) -> int:
        return self.number


def test_keys_are_read_where_they_are_said_to_be() -> None:
    record = FakeRecord(
        b'{"id": 7, "order": {"id": "o1"}}', b"customer", ("X-Id", b"h1"), ("message_id", b"m1")
    )
    assert key_reader("id")(record) == "7"
    assert key_reader("order.id")(record) == "o1"
    assert key_reader("header:x-id")(record) == "h1"
    assert key_reader("record:key")(record) == "customer"
    assert key_reader(None)(record) == "m1"
    assert key_reader(lambda each: each.value()[7:8])(record) == "7"


@pytest.mark.parametrize("spec", ["id", "header:x", "record:key", None])
@pytest.mark.parametrize("body", [None, b"", b"nonsense", b"{}", b"[1]", b'{"id": null}', b'{"id": ""}'])
def test_a_record_without_a_key_is_told(spec: str | None, body: bytes | None) -> None:
    with pytest.raises(KeyMissing):
        key_reader(spec)(FakeRecord(body))


@pytest.mark.parametrize("body", [b'{"id": [1]}', b'{"id": "\\u0000"}', b'{"id": "%s"}' % (b"x" * 600)])
def test_a_key_that_is_none_is_told(body: bytes) -> None:
    with pytest.raises(KeyInvalid):
        key_reader("id")(FakeRecord(body))


@pytest.mark.parametrize(
    "value",
    [
        AT_US // 10**6, AT_US // 1000, AT_US, AT_US * 1000, str(AT_US // 1000), float(AT_US // 10**6),
        datetime.fromtimestamp(AT_US / 10**6, UTC).isoformat(), "2026-11-17T16:06:50Z", "2026-11-17T17:06:50+01:00",
    ],
)  # fmt: skip
def test_times_are_read_in_every_usual_form(value: object) -> None:
    assert parse_time_us(value) == AT_US


@pytest.mark.parametrize("value", [None, True, "", "soon", "2026-11-17", -5, 0, 10**21, "nan", "-1", [1], {}])
def test_what_is_no_time_is_refused(value: object) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - several messages
        parse_time_us(value)


def test_the_time_of_an_event() -> None:
    record = FakeRecord(b'{"ts": "2026-11-17T16:06:50Z", "n": 1794931610000}', None, ("at", b"1794931610"))
    record.at_ms = AT_US // 1000
    for spec in ("ts", "n", "header:at", "record:timestamp"):
        read = time_reader_for(spec)
        assert read is not None
        assert read(record) == AT_US
    assert time_reader_for(None) is None


def test_a_time_far_ahead_is_refused_because_everything_after_it_would_be_late() -> None:
    read = time_reader_for("ts")
    assert read is not None
    ahead = now_us() + round(AHEAD_MAX_S * 10**6)
    assert read(FakeRecord(b'{"ts": %d}' % (ahead - 10**8)))
    for body in (b'{"ts": %d}' % (ahead + 10**8), b"{}", b"x", None):
        with pytest.raises(MessageInvalid):
            read(FakeRecord(body))


def test_a_header_needs_its_name() -> None:
    for read in (key_reader, time_reader_for):
        with pytest.raises(UsageError, match="header:"):
            read("header:")


# --- the contract ---


@pytest.mark.parametrize(
    ("key", "hashed"),
    [
        (b"21", -973932308),
        (b"foobar", -790332482),
        (b"a-little-bit-long-string", -985981536),
        (b"abc", 479470107),
    ],
)
def test_murmur2_is_javas(key: bytes, hashed: int) -> None:
    """The values of the tests of Kafka's own clients."""
    assert murmur2(key) == hashed & 0xFFFFFFFF


def records(number: int, *, java: bool, keyed: bool = True) -> list[FakeRecord]:
    made = []
    for n in range(number):
        key = f"k{n}".encode()
        record = FakeRecord(b"", key if keyed else None)
        record.number = (murmur2(key) & 0x7FFFFFFF) % 6 if java else crc32(key) % 6
        made.append(record)
    return made


def test_producers_that_scatter_copies_are_noticed_once() -> None:
    assert PartitionContract(6).look(records(50, java=True)) is None
    assert PartitionContract(6).look(records(50, java=False)) is None
    assert PartitionContract(1).look(records(50, java=True, keyed=False)) is None
    contract = PartitionContract(6)
    assert "no message key" in (contract.look(records(50, java=True, keyed=False)) or "")
    assert contract.look(records(50, java=True, keyed=False)) is None
    contract = PartitionContract(6)
    assert contract.look(records(50, java=True)) is None
    assert "two partitioners" in (contract.look(records(50, java=False)) or "")


def test_a_partitioner_of_their_own_is_no_mixture_and_only_the_start_is_looked_at() -> None:
    contract = PartitionContract(6)
    own = records(200, java=True)
    for n, record in enumerate(own):
        record.number = n % 6
    assert contract.look(own) is None
    contract = PartitionContract(6)
    assert contract.look(records(LOOKED_MAX, java=True)) is None
    assert contract.look(records(50, java=True, keyed=False)) is None
