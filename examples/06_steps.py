"""Several effects in one handler: a second attempt does not repeat the ones that are done."""

import semel

once = semel.open("sqlite:///events.db", consumer="orders")
log: list[str] = []


def handle(order: str) -> str:
    """Charge, then mail; the mail server is down at first."""
    charge = semel.step("charge", take_money, order)
    semel.step("mail", send_mail, order)
    return charge


def take_money(order: str) -> str:
    """Charge through the other system, with a key that is the same on every attempt."""
    log.append(f"charged {order}")
    return f"charge for {order}"


def send_mail(order: str) -> None:
    """Fail the first time."""
    if "mail failed" not in log:
        log.append("mail failed")
        raise ConnectionError("mail server is down")
    log.append(f"mailed {order}")


print(type(once.run("order-1", handle, "order-1")).__name__)
print(type(once.run("order-1", handle, "order-1")).__name__)
print(log)
once.close()

# prints:
# Errored
# Done
# ['charged order-1', 'mail failed', 'mailed order-1']
