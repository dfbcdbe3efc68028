"""What is kept of an error: bounded, safe to print, redacted by the policy's choice."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import semel
from semel.codec import decode_error
from semel.core.error_info import describe, encode_failure
from semel.core.settlement import attempts_exhausted
from semel.errors import PolicyInvalid
from semel.runtime.error_settings import read_error_settings
from semel.types import KIND_BYTES_MAX, MESSAGE_BYTES_MAX, TRACEBACK_BYTES_MAX, WORKER_BYTES_MAX, ErrorInfo

LIMITS = (KIND_BYTES_MAX, MESSAGE_BYTES_MAX, TRACEBACK_BYTES_MAX, WORKER_BYTES_MAX)


def worker() -> str:
    return "host:7:00000001"


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause  # noqa: TRY301 - to be caught with its traceback
    except BaseException as caught:  # noqa: BLE001 - that is the point
        return caught


@given(text=st.text(alphabet=st.characters(exclude_categories=()), max_size=3000))
def test_any_text_is_bounded_printable_and_encodable(text: str) -> None:
    info = ErrorInfo(text, text, text, text)
    for part, bytes_max in zip(msgspec.structs.astuple(info), LIMITS, strict=True):
        assert len(part.encode()) <= bytes_max
        assert not set(part) & set(map(chr, (*range(9), *range(11, 32), *range(127, 160), 0x202E, 0x2028)))
    assert "\n" not in info.kind + info.worker
    assert ErrorInfo(*msgspec.structs.astuple(info)) == info, "what is bounded stays as it is"
    assert msgspec.json.decode(msgspec.json.encode(info), type=ErrorInfo) == info


def test_what_comes_from_outside_is_bounded_too() -> None:
    sent = msgspec.json.encode({"kind": "k", "message": "m" * 10**6, "traceback": "first\n" + "t" * 10**6})
    info = msgspec.json.decode(sent, type=ErrorInfo)
    assert len(info.message.encode()) == MESSAGE_BYTES_MAX
    assert info.message.endswith("…")
    assert info.traceback.startswith("…"), "the end has the place"


def test_an_error_is_described_with_places_and_causes() -> None:
    error = raised(LookupError("no such card"), raised(OSError("refused")))
    info = describe(error, semel.Policy(), worker)
    assert info is not None
    assert (info.kind, info.message, info.worker) == ("builtins.LookupError", "no such card", worker())
    places = info.traceback.splitlines()
    assert places[0].startswith("  tests/core/test_error_info.py:")
    assert places[0].endswith(" in raised")
    assert places[1:3] == ["builtins.OSError: refused", "which led to"]
    assert len(places) == 4


def test_a_deep_stack_is_cut_to_its_end() -> None:
    def deep(left: int) -> None:
        if not left:
            raise ValueError("deep")
        deep(left - 1)

    with pytest.raises(ValueError, match="deep") as caught:
        deep(200)
    info = describe(caught.value, semel.Policy(), worker)
    assert info is not None
    assert len(info.traceback.splitlines()) == 8


def test_a_broken_error_is_kept_by_its_kind() -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise ValueError

    info = describe(Broken(), semel.Policy(), worker)
    assert info is not None
    assert info.kind.endswith("Broken")
    assert info.message == ""


def test_the_members_of_a_group_are_named() -> None:
    info = describe(raised(ExceptionGroup("two", [ValueError("a"), KeyError("b")])), semel.Policy(), worker)
    assert info is not None
    assert "  with builtins.ValueError: a" in info.traceback.splitlines()


def test_the_last_attempt_keeps_its_own_error() -> None:
    info = describe(attempts_exhausted(ValueError("no"), 3, 3), semel.Policy(), worker)
    assert info is not None
    assert (info.kind, info.message) == ("builtins.ValueError", "no")
    lost = describe(attempts_exhausted(None, 3, 3), semel.Policy(), worker)
    assert lost is not None
    assert lost.kind == "semel.errors.AttemptsExhausted"


def test_a_policy_keeps_none() -> None:
    assert describe(ValueError("no"), semel.Policy(keep_errors=False), worker) is None


def crash(_info: ErrorInfo) -> ErrorInfo:
    raise RuntimeError("in the redaction")


@pytest.mark.parametrize("redact", [crash, lambda _info: None, lambda info: info.message])
def test_a_redaction_that_fails_keeps_only_the_kind(redact: object) -> None:
    policy = semel.Policy(redact_error=redact)  # type: ignore[arg-type]
    assert describe(raised(ValueError("card 4242")), policy, worker) == ErrorInfo(
        "builtins.ValueError", worker=worker()
    )
    assert "4242" not in str(decode_error(encode_failure(ValueError("card 4242"), policy)))


def test_a_redaction_says_what_is_kept_also_of_a_failure() -> None:
    def hide(info: ErrorInfo) -> ErrorInfo:
        return msgspec.structs.replace(info, message=info.message.replace("4242", "****"), traceback="")

    policy = semel.Policy(redact_error=hide)
    error = ValueError("card 4242")
    assert describe(error, policy, worker) == ErrorInfo("builtins.ValueError", "card ****", "", worker())
    assert decode_error(encode_failure(error, policy)).message == "card ****"
    exhausted = decode_error(encode_failure(attempts_exhausted(error, 2, 2), policy))
    assert exhausted.kind == "semel.errors.AttemptsExhausted"
    assert exhausted.message == "the last attempt failed: builtins.ValueError: card ****"


def test_a_setting_keeps_all_none_or_what_a_function_leaves() -> None:
    assert read_error_settings("keep") == {}
    assert read_error_settings("none") == {"keep_errors": False}
    assert read_error_settings("tests.core.test_error_info:crash") == {"redact_error": crash}
    for wrong in ("all", "", "tests.core.test_error_info:nothing"):
        with pytest.raises(PolicyInvalid):
            read_error_settings(wrong)


def test_a_redaction_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(PolicyInvalid, match="redact_error"):
        semel.Policy(redact_error="hide")  # type: ignore[arg-type]
