"""Which store a URL of the memory store names."""

from semel.stores.registry import store_for


def test_a_store_without_a_name_is_shared_with_nobody() -> None:
    assert store_for("memory:") is not store_for("memory:")
    assert store_for("memory://") is not store_for("memory://")
    assert store_for("memory:?records_max=10") is not store_for("memory:?records_max=10")


def test_a_name_means_the_same_store_in_this_process() -> None:
    assert store_for("memory:shared-by-name") is store_for("memory:shared-by-name")
    assert store_for("memory://shared-by-name") is store_for("memory:shared-by-name?records_max=10")
    assert store_for("memory:another-name") is not store_for("memory:shared-by-name")
